"""Puts this folder on the path: ranks load a test by its file, and the tests here share ``hierarchy``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
