"""How large things may be on their way, and how long a caller may wait. The one place: who needs a limit takes it here.

a request's body   REQUEST_BYTES   of any request to the gateway; a bundle is the largest
a call's body      INLINE_BYTES    the arguments of one call, one result, one item, inside one message
a message          MESSAGE_BYTES   what our own nats-server takes (`max_payload`): a body and the header beside it
a large body       PARCEL_BYTES    handed on by reference: a file between processes of one host (`gpufn_platform.shared_bodies.bodies`), or
                                   a blob in the bus's object store (`gpufn_platform.queue.large_bodies`)
a queued body      RECORD_BYTES    the arguments of a submitted call, in its message; larger ones are a blob beside it
a kept result      RECORD_BYTES    in its CallRecord; a larger one is a blob beside it
a frame's body     MESSAGE_BYTES   between a runner and its worker: whatever a message may hold
a checkpoint       CHECKPOINT_BYTES   what a call may leave for its next attempt
progress           PROGRESS_CHARS    of what a call says of itself
a chunk of a map   CHUNK_ITEMS        in REQUEST_BYTES; beside its entry a message each, of the 1,000 of an atomic batch
a record           KEPT_ATTEMPTS      attempts of its call, the last ones
a timeout          LONGEST_TIMEOUT_S  that a caller may ask for
a whole number     LARGEST_INTEGER    such as a size in bytes: what a message can say
"""

from __future__ import annotations

MESSAGE_BYTES = 8 << 20
HEADER_BYTES = 512 << 10  # kept for the header: ids, and an error with its traceback
INLINE_BYTES = MESSAGE_BYTES - HEADER_BYTES
REQUEST_BYTES = 64 << 20
PARCEL_BYTES = REQUEST_BYTES
CHECKPOINT_BYTES = 4 << 20
PROGRESS_CHARS = 500
RECORD_BYTES = 1 << 20
CHUNK_ITEMS = 999
KEPT_ATTEMPTS = 20
DEAD_LETTERS_AT_ONCE = 1000  # in one list, or replayed by one request
LONGEST_TIMEOUT_S = 7 * 86_400.0
LARGEST_INTEGER = (1 << 63) - 1


def inline_bytes(max_payload: int) -> int:
    """The largest body of a call on a server that takes messages of `max_payload` bytes.

    >>> inline_bytes(MESSAGE_BYTES) == INLINE_BYTES, inline_bytes(1 << 20), inline_bytes(64 << 10)
    (True, 524288, 32768)
    """
    return min(INLINE_BYTES, max(max_payload - HEADER_BYTES, max_payload // 2))
