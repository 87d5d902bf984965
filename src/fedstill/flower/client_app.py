"""The Flower ClientApp: one action for every stage of every method, and one that says which client
a node is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedstill.flower.messages import (
    STAGE,
    WHOAMI,
    Request,
    SiteReply,
    content,
    header_and_payload,
    require_flower,
)

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

MOST_OF_A_REQUEST = 1 << 20
"""The most groups and tensors of a request: among peers, one holds the models of all."""

Does = Callable[[Request], SiteReply]
"""Does a stage for one client; a refusal or a failure is its answer."""


def client_app(clerk_of: Callable[[Context], tuple[int, Does]], max_bytes: int) -> ClientApp:
    """The app of a node; ``clerk_of`` gives the number of the client that the node is, and its
    clerk.
    """
    require_flower()
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train(STAGE.partition(".")[2])  # type: ignore[untyped-decorator]
    def stage(message: Message, context: Context) -> Message:
        _, clerk = clerk_of(context)
        request = Request.of(*header_and_payload(message.content, max_bytes, MOST_OF_A_REQUEST))
        return Message(content(clerk(request)), reply_to=message)

    @app.query(WHOAMI.partition(".")[2])  # type: ignore[untyped-decorator]
    def whoami(message: Message, context: Context) -> Message:
        client, _ = clerk_of(context)
        return Message(RecordDict({"whoami": ConfigRecord({"client": client})}), reply_to=message)

    return app
