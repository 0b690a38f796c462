"""Mutants of `tools/`."""

from __future__ import annotations

from mutants.mutant import Mutant

COMPARE, DAMAGED, REPORT = (
    f"tests/tools/{name}.py" for name in ("results/test_compare", "results/test_damaged", "report/test_report")
)

TOOLS = (
    Mutant(
        "noise is called a regression",
        "tools/results/comparison.py",
        "return SLOWER if low > 1 + margin else",
        "return SLOWER if high > 1 + margin else",
        f"{COMPARE}::test_a_change_counts_when_all_of_its_interval_is_beyond_the_margin",
    ),
    Mutant(
        "results of another schema are read",
        "tools/results/file.py",
        'if data["schema"] is True or data["schema"] != SCHEMA:',
        'if data["schema"] is True:',
        f"{DAMAGED}::test_a_file_that_is_no_result_is_refused_in_one_line",
    ),
    Mutant(
        "infinity is read as a time",
        "tools/results/decode.py",
        "not math.isfinite(_needed(float, value, place))",
        "math.isnan(_needed(float, value, place))",
        f"{DAMAGED}::test_the_decoder_names_the_place",
    ),
    Mutant(
        "TFLOP/s are of 1024 GFLOP/s",
        "tools/report/units.py",
        'f"{value / 1000:,.3g} TFLOP/s"',
        'f"{value / 1024:,.3g} TFLOP/s"',
        f"{REPORT}::test_units_are_written_for_people",
    ),
    Mutant(
        "a speed-up is shown as its inverse",
        "tools/report/speed.py",
        "case.entries[other].seconds, case.entries[ours].seconds",
        "case.entries[ours].seconds, case.entries[other].seconds",
        f"{REPORT}::test_a_speed_up_is_how_many_times_faster_ours_is",
    ),
    Mutant(
        "times that are too long meet their target",
        "tools/bench/target.py",
        "(worst <= limit if figure.lower else worst >= limit)",
        "worst >= limit",
        "tests/tools/bench/test_suite.py::test_the_worst_value_decides",
    ),
    Mutant(
        "a sample of several calls is taken for one call",
        "tools/measure/timing.py",
        "clock(function, calls[name]) / calls[name]",
        "clock(function, calls[name])",
        "tests/tools/measure/test_timing.py",
    ),
    Mutant(
        "the demo trains on the text that it is judged on",
        "tools/demo/text/corpus.py",
        "return texts[count:], texts[:count]",
        "return texts, texts[:count]",
        "tests/tools/demo/test_text.py::test_held_out_files_are_never_trained_on",
    ),
    Mutant(
        "crops are standardised by the strip that is held out, too",
        "tools/demo/image/photo.py",
        "photo[:, self.stop :]], 1)",
        "photo[:, self.start :]], 1)",
        "tests/tools/demo/test_image.py::test_the_strip_is_never_trained_on",
    ),
    Mutant(
        "`dilkit compare` ends with 0 after a regression",
        "tools/commands/compare.py",
        "return 1 if comparison.regressions else 0",
        "return 0",
        f"{COMPARE}::test_a_regression_is_exit_code_1",
    ),
    Mutant(
        "`dilkit verify` ends with 0 though the backend that was named computed nothing",
        "tools/commands/verify.py",
        'counts["passed"] > 0 and not idle and',
        'counts["passed"] >= 0 and',
        "tests/tools/commands/test_verify.py::test_verify_exits_with_1_if_a_backend_that_is_named_computes_nothing",
    ),
    Mutant(
        "bits a second are taken for bytes",
        "tools/console/quantities.py",
        '(8 if match[4] in ("bit", "b") else 1)',
        '(8 if match[4] in ("bit",) else 1)',
        "tests/tools/commands/test_plan.py::test_numbers_as_people_write_them",
    ),
)
