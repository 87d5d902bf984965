"""The version of this package; a server and its sites must have the same."""

VERSION = "0.2.0"
