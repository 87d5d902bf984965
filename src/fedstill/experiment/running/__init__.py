"""One run from its beginning or its last checkpoint to its end: the round loop driven, journaled and measured."""
