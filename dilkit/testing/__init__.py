"""The conformance suite: the problems that every backend is checked on, and the check against the double-precision oracle.

Tests of a backend of your own can use it as dilkit does:

    from dilkit.testing.conformance import check
    from dilkit.testing.problems import PROBLEMS

    assert check("my_backend", PROBLEMS[0]).verdict == "passed"
"""
