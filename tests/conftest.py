"""One thread for the tests: their tensors are tiny, and threads that wait for each other cost more than they bring."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported, also by child processes
