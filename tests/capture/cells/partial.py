"""Values with a part that cannot come back: each cell is a case of test_partial.py."""


# %% a part that cannot be sent
class Log:
    def __init__(self):
        self.rows, self.file = [1, 2], open("log.txt", "w")  # noqa: SIM115
        self.file.close()


class Running:
    def __init__(self):
        self.steps = [(step for step in ()) for _ in range(30)]

    def __reduce__(self):
        raise NotImplementedError("only where it runs")


def train():
    return {"weights": [0.5], "logs": [Log(), 5], "rows": (row for row in ()), "running": Running()}


try:
    in_ddp(2, train)
except CaptureError as error:
    assert "returned['logs'][0].file cannot be sent" in str(error) and "sys.last_value.value" in str(error), error
    value = error.value
assert value["weights"] == [0.5] and value["logs"][1] == 5 and value["logs"][0].rows == [1, 2]
assert "returned['logs'][0].file (TextIOWrapper: " in repr(value["logs"][0].file) and "generator" in value["rows"].why
assert value["running"].why == "Running: only where it runs", value["running"]  # its generator is not to blame

# %% a part that cannot be rebuilt
import os


def of_a_rank():
    return os.environ["RANK"]


class Rebuilt:
    def __reduce__(self):
        return of_a_rank, ()


class Fussy:
    def __init__(self):
        self.kept = [1, 2]

    def __setstate__(self, state):
        raise OSError("only where it was made")


def train():
    fussy = Fussy()
    return [range(3), {"a": fussy, "b": [fussy, 2], "c": Rebuilt()}, {Rebuilt(): 1}, [[Rebuilt()], {4}]]


with Session(2) as session:
    for call, many in [(lambda: in_ddp(1, train), False), (lambda: session.run_all(train), True)]:
        try:
            call()
        except CaptureError as error:
            value = error.value[0] if many and len(error.value) == 1 else error.value
            assert "OSError: only where it was made" in str(error), error
        assert value[0] == range(3) and value[1]["a"].state == {"kept": [1, 2]} and value[1]["b"] == [value[1]["a"], 2]
        assert "KeyError: 'RANK'" in value[1]["c"].why and list(value[2].values()) == [1] and value[3][1] == {4}
    assert session.run(lambda: 5) == 5


# %% nothing is left without it
def train():
    return (row for row in ())


try:
    in_ddp(1, train)
except CaptureError as error:
    assert error.value is None and "last_value" not in str(error), error
else:
    raise AssertionError
