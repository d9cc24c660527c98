"""Each usual trouble is found with its rows, and sound data is left in peace."""

from pathlib import Path

import pytest

from services.offline.datasets import Finding, SimulatorConfig, read_data, simulate
from services.offline.datasets.validation import check

NOW_S = 1_800_000_000.0
HEADER = "user,item,timestamp,type,value,title\n"
GOOD = "".join(f"u{n % 2},i{n % 3},{1_700_000_000 + n},view,{n % 5},T{n % 3}\n" for n in range(30))


def found_in(tmp_path: Path, extra: str, header: str = HEADER, base: str = GOOD) -> dict[str, Finding]:
    path = tmp_path / "t.csv"
    path.write_text(header + base + extra)
    return {finding.what: finding for finding in read_data(path, now_s=NOW_S).findings}


def test_sound_data_has_no_errors_or_warnings(tmp_path: Path) -> None:
    assert all(finding.severity == "info" for finding in found_in(tmp_path, "").values())


@pytest.mark.parametrize(
    ("row", "what", "severity"),
    [
        ("u0,i0,1700000000,view,1,T0\n", "duplicate events", "warning"),
        (",i0,1700000100,view,1,T0\n", "user id is missing", "error"),
        ("u0,,1700000100,view,1,\n", "item id is missing", "error"),
        (f"{'u' * 129},i0,1700000100,view,1,T0\n", "user id out of range (has 129 bytes)", "error"),
        ("u0,i\t0,1700000100,view,1,T0\n", "item id out of range (holds a control character)", "error"),
        ("U0,i0,1700000100,view,1,T0\n", "user ids that look alike", "warning"),
        ("u0,i0,1700000100,view,nan,T0\n", "value is NaN, infinite or beyond single precision", "error"),
        ("u0,i0,1700000100,view,many,T0\n", "value is no number ('many')", "error"),
        ("u0,i0,2000000000,view,1,T0\n", "timestamp lies in the future", "error"),
        ("u0,i0,1600000000,view,1,T0\n", "times go back inside a user's rows", "warning"),
        ("u0,i0,,view,1,T0\n", "timestamp is missing", "error"),
        ("u0,i0,12,view,1,T0\n", "timestamp is outside 1973 to 2100 in s, the unit of most rows (first: 12)", "error"),
        ("u9,i0,1700000100,view,1,T0\n", "users with too few events", "warning"),
        ("u0,i9,1700000100,view,1,T9\n", "rare items", "info"),
        ("u0,i0,1700000100,view,1,Other\n", "an item has several titles", "warning"),
    ],
)
def test_each_trouble_is_found(tmp_path: Path, row: str, what: str, severity: str) -> None:
    finding = found_in(tmp_path, row)[what]
    assert finding.severity == severity
    assert finding.count >= 1
    assert finding.advice


def test_the_row_is_the_files_own_row(tmp_path: Path) -> None:
    assert (
        found_in(tmp_path, "u0,i0,1700000100,view,inf,T0\n")["value is NaN, infinite or beyond single precision"].where
        == "rows 32"
    )


def test_many_rows_are_summed_up(tmp_path: Path) -> None:
    finding = found_in(tmp_path, "u0,i0,1700000100,view,1,T0\n" * 9)["duplicate events"]
    assert finding.count == 8
    assert finding.where.endswith("and 3 more")


def test_constant_columns_are_found(tmp_path: Path) -> None:
    rows = "".join(f"u{n},only,1700000000,view,3,T\n" for n in range(4))
    found = found_in(tmp_path, rows, base="")
    assert "item column is constant ('only')" in found
    assert "value column is constant (3)" in found
    assert "all timestamps are equal" in found


def test_whole_days_are_found(tmp_path: Path) -> None:
    rows = "".join(f"u{n % 2},i{n % 3},2023-01-{n % 28 + 1:02d},view,{n % 5},T{n % 3}\n" for n in range(30))
    assert "timestamps are whole days" in found_in(tmp_path, rows, base="")


def test_a_missing_column_is_one_finding(tmp_path: Path) -> None:
    (finding,) = found_in(tmp_path, "", header="a,b,c,d,e,f\n").values()
    assert finding.severity == "error"
    assert "no user column" in finding.what


def test_an_empty_table_is_one_finding(tmp_path: Path) -> None:
    assert list(found_in(tmp_path, "", base="")) == ["no events"]


def test_loaded_interactions_can_be_checked() -> None:
    data = simulate(SimulatorConfig(num_users=100, num_items=200, num_topics=8, mean_events_per_user=40))
    assert not [finding for finding in check(data, now_s=NOW_S) if finding.severity == "error"]


def test_worst_findings_come_first(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + GOOD + "u0,i9,2000000000,view,1,T9\nu0,i9,2000000000,view,1,T9\n")
    severities = [finding.severity for finding in read_data(path, now_s=NOW_S).findings]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)
