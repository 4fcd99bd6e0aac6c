"""What lies here is another distribution: test_third_party.py builds, installs and runs it."""

collect_ignore_glob = ["*"]
