"""What the documents name exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_file_and_test_that_numerics_names_exists():
    """A table of cures is worth what its tests are worth: one that was renamed or removed must not stay in it."""
    text = (ROOT / "docs/numerics.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)::(test_\w+)`", text)
    assert len(named) > 80
    defined = {(file.stem, name) for file in (ROOT / "tests").rglob("test_*.py")
               for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)}
    absent = sorted(set(named) - defined)
    absent += [path for path in re.findall(r"`((?:models|engine|rollout|train|tests)/[\w/.]+\.py)`", text)
               if not (ROOT / path).is_file()]
    absent += [link for link in re.findall(r"\]\(([\w-]+\.md)\)", text) if not (ROOT / "docs" / link).is_file()]
    assert not absent
