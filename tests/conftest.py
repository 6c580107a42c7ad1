"""What holds for every test."""

import signal


def pytest_configure() -> None:
    # Who starts pytest in the background has SIGINT ignored, by all that it starts as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
