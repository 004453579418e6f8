"""The prompt stream: every epoch has every prompt once, in another order; repeats draw other numbers."""

from rollout.collect import requests_of
from rollout.data import Example
from train.prompts import PromptStream


def stream(count: int, seed: int = 0) -> PromptStream:
    examples = tuple((Example(str(n), f"p{n}", "", {}), (n,)) for n in range(count))
    return PromptStream("set", "digest", examples, seed)


def ids(prompts) -> list[str]:
    return [prompt.example.id for prompt in prompts]


def test_consecutive_steps_walk_through_whole_epochs():
    """12 prompts, 4 a step: steps 1-3 are one epoch, 4-6 the next, in another order."""
    found = [ids(stream(12).step(step, 4)) for step in range(1, 7)]
    first, second = sum(found[:3], []), sum(found[3:], [])
    assert sorted(first, key=int) == sorted(second, key=int) == [str(n) for n in range(12)]
    assert first != second
    assert found == [ids(stream(12).step(step, 4)) for step in range(1, 7)]


def test_another_data_seed_is_another_order():
    assert ids(stream(30).step(1, 30)) != ids(stream(30, seed=1).step(1, 30))


def test_groups_are_numbered_and_a_repeated_prompt_draws_other_numbers():
    """3 prompts, 5 a step: a step holds a prompt more than once; no two samples may share a uid."""
    prompts = stream(3).step(1, 5)
    assert [prompt.group for prompt in prompts] == [0, 1, 2, 3, 4]
    assert max(prompt.occurrence for prompt in prompts) >= 1
    requests = requests_of(prompts, step=1, dataset="set", group_size=2, max_new_tokens=1)
    assert len({request.uid for request in requests}) == len(requests) == 10


def test_evaluation_takes_the_first_prompts_in_file_order():
    assert ids(stream(5).first(3)) == ["0", "1", "2"] and len(stream(5).first(None)) == 5
