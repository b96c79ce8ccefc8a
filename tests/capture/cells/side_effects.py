"""Code that test_side_effects.py runs as a script and as a cell."""

# %% a script
import course.extras  # noqa: F401
from course.learner import make

from nbdist import in_ddp

if __name__ == "__main__":
    print(in_ddp(1, lambda: make().bonus()))


# %% fastai
def train():
    from fastai.learner import Learner

    return callable(collab_learner) and hasattr(Learner, "distrib_ctx")


print(in_ddp(2, train))
