"""Parts of the scripts of test_leaving.py."""

# %% in a session
import multiprocessing
import os
import sys
import time

from nbdist import NbdistError, Session, in_ddp

session = Session(2)
pids = session.run_all(os.getpid)
kernel = os.getpid()

# %% fork
pid = os.fork()
if pid == 0:
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0

# %% multiprocessing
child = multiprocessing.get_context("fork").Process(target=print)
child.start()
child.join()
assert child.exitcode == 0

# %% a child that drops the session
pid = os.fork()
if pid == 0:
    session.close()
    del session
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0

# %% a child that calls it
pid = os.fork()
if pid == 0:
    try:
        session.run(os.getpid)
    except NbdistError as error:
        assert "forked" in str(error), error
        assert set(session.restart() or session.run_all(os.getpid)).isdisjoint(pids)
        assert in_ddp(1, os.getpid) not in pids
        sys.exit(0)
    os._exit(1)
assert os.waitpid(pid, 0)[1] == 0

# %% the kernel names its ranks
if os.getpid() == kernel:
    print(*pids, flush=True)
time.sleep(1000)
