"""Matching the hidden units of networks that were trained apart, so that they can be averaged."""

from fedstill.matching.layer import Matched, MatchingSettings, match
from fedstill.matching.models import match_models, matchable, unmatched
from fedstill.matching.whole_network import widened

__all__ = [
    "Matched",
    "MatchingSettings",
    "match",
    "match_models",
    "matchable",
    "unmatched",
    "widened",
]
