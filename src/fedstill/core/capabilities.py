"""What a method needs, permits and adds, as typed flags.

A method declares them in its class, for example ``needs = Need.SAME_SHAPES | Need.HEAD``. Before
round 1, ``running/compatibility.py`` checks them against the run's settings, data and networks.
"""

from __future__ import annotations

from enum import Flag, auto


class Declared(Flag):
    """Flags that a class declares."""

    @property
    def words(self) -> list[str]:
        """The names of the flags as ``fedstill list`` prints them, sorted.

        >>> (Need.SAME_SHAPES | Need.HEAD).words
        ['head', 'same_shapes']
        """
        return sorted(str(flag.name).lower() for flag in self)


class Need(Declared):
    """What a method requires. For a network: which of these it provides."""

    NOTHING = 0

    SAME_SHAPES = auto()
    """All clients train the same architecture, because the server averages weights."""

    SAME_FEATURES = auto()
    """Networks may differ, but their bodies have equally many features."""

    FEATURES = auto()
    """The network is a head on a body, and its features are the output of the body."""

    HEAD = auto()
    """The network has a separate last layer, ``head``."""

    ETF = auto()
    """The head is a fixed simplex."""

    LEVELS = auto()
    """The body is a chain of layers, and a forward pass can begin at any of them."""

    PAIR = auto()
    """Each client has a private network beside the shared one."""

    SLIM = auto()
    """A stage of the body can run at a share of its width."""

    PUBLIC_DATA = auto()
    """There are public examples."""

    LABEL_COUNTS = auto()
    """The server knows every client's label counts: a census before round 1."""

    QUERIES = auto()
    """Clients ask their peers for classes."""


OF_NETWORKS = Need.FEATURES | Need.HEAD | Need.ETF | Need.LEVELS | Need.PAIR | Need.SLIM
"""The needs that a network meets by its structure (``models.contract.capabilities``)."""


class Permit(Declared):
    """What may be done to the replies of a method's clients, or to their training."""

    NOTHING = 0

    LINEAR_AGGREGATE = auto()
    """Secure sums: the aggregate of single models is the aggregate of their mean."""

    CENTRAL_NOISE = auto()
    """Noise on the mean at the server."""

    ROBUST_AGGREGATE = auto()
    """Means that hostile clients can hardly move, such as a median."""

    PRIVATE_TRAINING = auto()
    """DP-SGD at clients: training uses the data only through gradients of single examples."""

    NOISY_LOGITS = auto()
    """Noise on the logits that clients send."""


class Addition(Declared):
    """What a method adds to every network, initially zeros (``models.building``)."""

    NOTHING = 0

    OWN_HEAD = auto()
    """A second last layer beside the head."""

    SHIFT = auto()
    """A vector that is added to the features."""
