"""Budget profiles that ship with kvalloc: data only.

The folder is the package ``kvalloc.profiles``: an installation maps it there, and the link
``kvalloc/profiles`` does the same in a working tree. ``kvalloc.load_profile`` reads a profile
from here by its name; ``README.md`` says how each one was made.
"""

if __name__ != "kvalloc.profiles":
    raise ImportError(
        f"this folder is the package 'kvalloc.profiles' and was imported as {__name__!r}: "
        "write 'import kvalloc.profiles', or load a profile by name with kvalloc.load_profile"
    )
