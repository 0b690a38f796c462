from dilkit.decoding.step import Step
from dilkit.problem import Problem

def check(step: Step, problem: Problem) -> None: ...
