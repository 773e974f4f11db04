"""docs/tested-reports.md and the tests it names know each other."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
DOCUMENT = FOLDER.parents[1] / "docs" / "tested-reports.md"


def test_every_report_has_its_test_and_every_test_its_report():
    tests = {
        name
        for path in FOLDER.glob("test_field_reports_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE)
    }
    named = set(re.findall(r"`(test_(?!field_reports)\w+)`", DOCUMENT.read_text()))
    assert named - tests == set(), "named in the document, but no such test"
    assert tests - named <= {"test_a_layer_without_process_groups_says_what_to_call"}, "no row in the document"
