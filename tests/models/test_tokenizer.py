"""The tokenizer of a model folder: ids, text, chat template, and the ids that end a response."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from models.tokenizer import load_tokenizer, stop_ids

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz", " ", "\n"]
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


@pytest.fixture
def folder(tmp_path):
    """A character tokenizer with three special tokens (ids 0..2), saved with truncation on."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(WORDS[:3])
    backend.enable_truncation(4)
    backend.enable_padding(length=4, pad_token=WORDS[0])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def test_encode_and_decode_are_inverse_and_never_cut_or_pad(folder):
    """The file asks for truncation to 4 ids; a prompt cut in silence would answer another question."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("abcabc") == [3, 4, 5, 3, 4, 5]
    assert tokenizer.encode("a") == [3]
    assert tokenizer.decode([3, 4, 5, 3, 4, 5]) == "abcabc"
    assert tokenizer.vocab_size == len(WORDS) == 31


def test_special_tokens_are_recognised_in_text_and_left_out_of_decoded_text(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<|im_start|>ab<|im_end|>") == [1, 3, 4, 2]
    assert tokenizer.decode([1, 3, 4, 2, 0]) == "ab"


def test_text_outside_the_vocabulary_is_an_error_that_names_it(folder):
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot encode 'aB'"):
        load_tokenizer(folder).encode("aB")


@pytest.mark.parametrize(("eos", "generation", "wanted"), [
    ("<|im_end|>", None, (2,)),
    ({"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False}, None, (2,)),
    ("<|im_end|>", {"eos_token_id": 0, "repetition_penalty": 1.05, "top_k": 50}, (0, 2)),
    ("<|im_end|>", {"eos_token_id": [2, 0, 5]}, (0, 2, 5)),
    (None, {"eos_token_id": [2]}, (2,)),
    (None, {"eos_token_id": None}, ()),
    (None, {}, ()),
])
def test_stop_ids_are_the_union_of_the_folders_files(folder, eos, generation, wanted):
    write(folder, "tokenizer_config.json", {"eos_token": eos})
    if generation is not None:
        write(folder, "generation_config.json", generation)
    assert load_tokenizer(folder).stop_ids == wanted


def test_union_with_config_and_caller_is_sorted_without_duplicates(folder):
    """config.json says 0, tokenizer_config.json says 2: both must stop, and the caller's 5."""
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    tokenizer = load_tokenizer(folder)
    assert stop_ids((0,), tokenizer, (5, 2)) == (0, 2, 5)
    assert stop_ids((), tokenizer) == (2,)
    for bad in (-1, True, "2"):
        with pytest.raises(ValueError, match="stop id of the caller"):
            stop_ids((), tokenizer, [bad])


def test_eos_that_tokenizer_json_holds_as_an_ordinary_token_does_not_show_in_text(folder):
    write(folder, "tokenizer_config.json", {"eos_token": "\n"})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.stop_ids == (30,)
    assert tokenizer.encode("a\nb") == [3, 30, 4]
    assert tokenizer.decode([3, 30]) == "a"


def test_chat_template_from_config_opens_the_assistant_turn(folder):
    write(folder, "tokenizer_config.json", {"chat_template": CHATML})
    tokenizer = load_tokenizer(folder)
    text = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(text)[0] == 1 and tokenizer.encode(text).count(1) == 2


def test_the_template_named_default_is_chosen_and_its_lack_is_an_error(folder):
    named = [{"name": "tool_use", "template": "wrong"}, {"name": "default", "template": "right"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert load_tokenizer(folder).chat([]) == "right"
    write(folder, "tokenizer_config.json", {"chat_template": named[:1]})
    with pytest.raises(ValueError, match=r"no template named 'default', only \['tool_use'\]"):
        load_tokenizer(folder)


def test_template_file_wins_over_the_config_and_gets_the_special_tokens(folder):
    write(folder, "tokenizer_config.json", {
        "chat_template": "old", "bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>", "pad_token": None})
    write(folder, "chat_template.jinja",
          "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token is defined }}{{ tools is none }}")
    assert load_tokenizer(folder).chat([]) == "<|im_start|><|im_end|><|endoftext|>FalseTrue"


@pytest.mark.parametrize(("template", "complaint"), [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ("{% if %}", "TemplateSyntaxError"),
    ("{{ strftime_now('%d') }}", "strftime_now"),
    ("{{ 'a' + 1 }}", "TypeError"),
])
def test_a_template_that_fails_is_an_error_that_names_the_folder(folder, template, complaint):
    """The clock is refused too: a prompt that depends on the day cannot be replayed."""
    write(folder, "tokenizer_config.json", {"chat_template": template})
    with pytest.raises(ValueError, match=complaint) as caught:
        load_tokenizer(folder).chat([{"role": "user", "content": "hi"}])
    assert str(folder) in str(caught.value)


def test_tojson_does_not_escape_for_html(folder):
    write(folder, "tokenizer_config.json", {"chat_template": "{{ messages[0]['content'] | tojson }}"})
    assert load_tokenizer(folder).chat([{"role": "user", "content": "a<b é"}]) == '"a<b é"'


def test_chat_without_a_template_is_refused(folder):
    with pytest.raises(ValueError, match="has no chat template"):
        load_tokenizer(folder).chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(("name", "content", "complaint"), [
    ("tokenizer.json", "{", r"tokenizer\.json: not a tokenizer"),
    ("tokenizer_config.json", "{", r"tokenizer_config\.json: not readable as JSON"),
    ("tokenizer_config.json", "[]", r"tokenizer_config\.json: expected a JSON object"),
    ("tokenizer_config.json", {"eos_token": 2}, r"tokenizer_config\.json: eos_token = 2"),
    ("tokenizer_config.json", {"eos_token": "<eos>"}, r"eos_token = '<eos>' is not in tokenizer\.json"),
    ("tokenizer_config.json", {"chat_template": 3}, "chat_template must be a text or a list"),
    ("generation_config.json", {"eos_token_id": "2"}, r"generation_config\.json: eos_token_id = '2'"),
    ("generation_config.json", {"eos_token_id": [True]}, r"generation_config\.json: eos_token_id = \[True\]"),
])
def test_bad_files_are_refused_by_name(folder, name, content, complaint):
    write(folder, name, content)
    with pytest.raises(ValueError, match=complaint):
        load_tokenizer(folder)


def test_a_folder_without_tokenizer_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: not found"):
        load_tokenizer(tmp_path)
