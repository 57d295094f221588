"""Its presence puts tests/ on the import path: the rooms share `ranks.py`."""

import signal

from hypothesis import settings

# How long an example takes says nothing about the code on a machine that others use too.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# A shell starts background jobs with Ctrl-C ignored, and nohup what hangs up; the tests send both signals on purpose.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
