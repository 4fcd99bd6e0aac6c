"""Built-in solvers, one file a solver, loaded by name from entry points ``kvalloc.solvers``."""

if __name__ != "kvalloc.solvers":
    # Found as a top-level folder, the same file would be loaded twice under two names, and
    # classes from one copy would not be instances of the other's.
    raise ImportError(
        f"this folder is the package 'kvalloc.solvers' and was imported as {__name__!r}: "
        "write 'import kvalloc.solvers', or ask for a solver by name with kvalloc.get_solver"
    )
