"""What a run refuses when it is built."""

import pytest
from tiny_run import overrides

from models.checkpoint import save_model
from models.initial import init_model
from models.ouro import new_source, parse
from train.run import main


def test_a_reference_of_another_shape_is_refused_by_name(tmp_path):
    """It was found out in the first update, as a log that "was made with loops = 3", after the rollout."""
    settings = overrides(tmp_path, **{"learner.kl_coefficient": 0.1})
    source = new_source(hidden=16, intermediate=24, layers=2, heads=2, vocab=257, loops=2, max_positions=1024)
    save_model(init_model(parse(source), seed=0), tmp_path / "other")
    with pytest.raises(ValueError, match="learner.reference = .*other.*loops = 2, that of model.path is 3"):
        main([*settings, f"learner.reference={tmp_path / 'other'}"])
    assert not (tmp_path / "run").exists()
