"""The tag is the version: python .ci/check_tag.py v0.1.0. And CHANGELOG.md has a section for it."""

import sys
import tomllib
from pathlib import Path

version = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
if sys.argv[1:] != [f"v{version}"]:
    sys.exit(f"the tag is {sys.argv[1:]}, the version in pyproject.toml {version}")
if f"\n## [{version}] - " not in Path("CHANGELOG.md").read_text(encoding="utf-8"):
    sys.exit(f"CHANGELOG.md has no section [{version}] with a date")
