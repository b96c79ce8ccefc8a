"""Scripts of test_sandboxes.py."""

# %% a command for which system calls fail
# Arguments: the numbers of the calls on x86-64, and the command. The calls fail with EPERM, as under a seccomp profile.
import ctypes
import errno
import os
import struct
import sys

calls, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = [int(call) for call in sys.argv[1].split(",")], 38, 22
parts = [struct.pack("HBBI", 0x20, 0, 0, 0)]  # load the number of the call
parts += [struct.pack("HBBI", 0x15, len(calls) - i, 0, call) for i, call in enumerate(calls)]  # is it this one?
parts += [struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)]  # allow it
parts += [struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | errno.EPERM)]
code = ctypes.create_string_buffer(b"".join(parts))


class Program(ctypes.Structure):
    _fields_ = [("size", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


libc, program = ctypes.CDLL(None, use_errno=True), Program(len(parts), ctypes.cast(code, ctypes.c_void_p))
for option, *arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)):
    if libc.prctl(option, *arguments):
        sys.exit(f"prctl({option}): {os.strerror(ctypes.get_errno())}")
os.execvp(sys.argv[2], sys.argv[2:])

# %% all that ranks do
# Writes what it finds to the file that it is given: its standard output may be closed.
import os
import sys
import time

import numpy as np

import nbdist

with open(sys.argv[1], "w") as found, nbdist.Session(2) as session:
    big = np.ones(1_000_000)
    print([float(values.sum()) for values in session.run_all(lambda: 2 * big)], file=found)
    try:
        session.run(lambda: os._exit(3))
    except nbdist.RankDied as exc:
        print("exit code 3" in str(exc), file=found)
    session.restart()

    def save_at_the_end():
        try:
            open(sys.argv[1] + ".begun", "w").close()
            time.sleep(1000)
        finally:
            open(sys.argv[1] + ".saved", "w").close()

    future = session.submit(save_at_the_end)
    while not os.path.exists(sys.argv[1] + ".begun"):
        time.sleep(0.01)
    future.cancel()
    print(session.run(lambda: 5), os.path.exists(sys.argv[1] + ".saved"), file=found)
    print(nbdist.parallel_map(lambda x: 2 * x, range(3), 2, progress=False), file=found)
    if sys.argv[2]:
        with nbdist.Session(1, name="sandboxed", devices="cpu") as named:
            print(named.run(lambda: 7), nbdist.attach("sandboxed").run(lambda: 8), file=found)
