"""What the check prints: lines as they come, the table, the JSON file, the exit status."""

import io
import json

import pytest
from gpu_check.lines import Line, Report, Target, first_line, first_sentence, last_lines, rate


def report_with(*lines):
    out = io.StringIO()
    report = Report(out)
    for line in lines:
        report.add(line)
    return report, out


MEASURED = Line("decode", "64 x 4096, triton", "measured", "0.3 ms", {"seconds": 3e-4}, Target(0.8, 0.84, "the copy"))
MISSED = Line("prefill", "1 x 8192, triton", "measured", "9 ms", {}, Target(0.6, 0.5, "the other"))
NOT_RUN = Line("engine", "flash_attn", "not run", "no GPU")
FAILED = Line("suite", "triton", "failed", "1 failed")


def test_a_line_is_printed_when_it_comes_with_what_became_of_its_target():
    _, out = report_with(MISSED)
    first, second = out.getvalue().splitlines()
    assert first.endswith(" s] prefill: 1 x 8192, triton: measured: 9 ms")
    assert second.endswith(" s]     target missed: 0.50 of the other, wanted 0.6")


@pytest.mark.parametrize(
    ("lines", "status"), [([], 0), ([MEASURED, NOT_RUN], 0), ([MISSED], 0), ([MEASURED, FAILED], 1)]
)
def test_the_exit_status_speaks_of_failures_alone(lines, status):
    assert report_with(*lines)[0].exit_status == status


def test_a_target_is_met_from_its_own_figure_on():
    assert Target(0.8, 0.8, "it").is_met
    assert not Target(0.8, 0.7999, "it").is_met


def test_the_table_has_a_row_a_line_and_a_sentence_below():
    report, out = report_with(MEASURED, MISSED, NOT_RUN, FAILED)
    out.truncate(0)
    out.seek(0)
    report.print_table()
    _, *rows, _, summary = out.getvalue().splitlines()
    assert rows == [
        "part     what               status    result    target",
        "decode   64 x 4096, triton  measured  0.3 ms    met: 0.84 of the copy, wanted 0.8",
        "prefill  1 x 8192, triton   measured  9 ms      missed: 0.50 of the other, wanted 0.6",
        "engine   flash_attn         not run   no GPU",
        "suite    triton             failed    1 failed",
    ]
    assert summary == "4 lines in 0 s: 2 measured, 1 failed, 1 not run; targets: 1 of 2 met."


def test_a_long_result_goes_on_in_its_column_and_nothing_is_lost():
    text = "a reason\nof two lines " + "and many words " * 20 + "compared with it"
    target = Target(0.8, 0.84, "it")
    report, out = report_with(Line("decode", "x", "not run", text, {}, target), NOT_RUN)
    out.truncate(0)
    out.seek(0)
    report.print_table()
    first, *further, last = out.getvalue().splitlines()[2:-2]
    start = "decode  x           not run  "
    assert first.startswith(f"{start}a reason of two lines and many words")
    assert first.endswith("  met: 0.84 of it, wanted 0.8")
    assert all(row.startswith(" " * len(start)) and len(row) <= len(start) + 100 for row in further)
    results = [row[len(start) :][:100].strip() for row in (first, *further)]
    assert " ".join(results) == " ".join(text.split())
    assert last == "engine  flash_attn  not run  no GPU"


def test_the_json_file_has_everything(tmp_path):
    report, _ = report_with(MEASURED, FAILED)
    report.write_json(tmp_path / "out.json", {"device": "cuda"})
    held = json.loads((tmp_path / "out.json").read_text())
    assert (held["device"], held["exit_status"]) == ("cuda", 1)
    assert held["lines"][0] == {
        "part": "decode",
        "what": "64 x 4096, triton",
        "status": "measured",
        "text": "0.3 ms",
        "figures": {"seconds": 3e-4},
        "target": {"wanted": 0.8, "reached": 0.84, "of": "the copy", "is_met": True},
    }


@pytest.mark.parametrize("line", [MEASURED, NOT_RUN])
def test_a_line_survives_the_way_through_a_pipe(line):
    assert Line.from_json(json.loads(json.dumps(line.as_json()))) == line


@pytest.mark.parametrize(
    ("per_s", "text"),
    [(4.047e12, "4.05 TB/s"), (9.9e14, "990 TB/s"), (1e9, "1 GB/s"), (3.25e4, "32.5 kB/s"), (7, "7 B/s")],
)
def test_a_rate_has_few_digits(per_s, text):
    assert rate(per_s, "B/s") == text


def test_of_a_long_text_the_first_or_the_last_lines_are_shown():
    assert first_line("\n  a\nb") == "a"
    assert first_line(" \n") == "no message"
    assert last_lines("a\n\nb\nc\n", 2) == "b | c"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Could not run 'aten::x' here. This could be because of much.\nMore.", "Could not run 'aten::x' here."),
        ("No available kernel. Aborting execution.", "No available kernel."),
        ("no end", "no end"),
        ("torch 2.11 has none", "torch 2.11 has none"),
    ],
)
def test_of_a_list_of_all_that_there_is_the_first_sentence_is_shown(text, sentence):
    assert first_sentence(text) == sentence
