"""Settings of the property tests: no time limit on busy machines, the same examples in CI."""

import os

from hypothesis import settings

settings.register_profile("laptop", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "laptop")
