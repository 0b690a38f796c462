from dilkit.decoding.protocol import Step
from dilkit.problem import Problem

def check(step: Step, problem: Problem) -> None: ...
