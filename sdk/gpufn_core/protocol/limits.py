"""Limits of sizes and of timeouts, in one place.

request body       REQUEST_BYTES        of any request to the gateway; a bundle is the largest
body of a call     INLINE_BYTES         the arguments of one call, one result or one item, inside one message
message            MESSAGE_BYTES        `max_payload` of our own nats-server: a body plus its header
large body         LARGE_BODY_BYTES     passed by reference: a file shared between processes of one host
                                        (`gpufn_platform.shared_bodies.bodies`), or a blob in the NATS object store
                                        (`gpufn_platform.queue.large_bodies`)
queued body        RECORD_BYTES         the arguments of a submitted call, in its message; a separate blob if larger
stored result      RECORD_BYTES         in its CallRecord; a separate blob if larger
body of a frame    MESSAGE_BYTES        between a runner and its worker; the size of a message
checkpoint         CHECKPOINT_BYTES     stored by a call for its next attempt
progress           PROGRESS_CHARS       the progress message of a call
chunk of a map     CHUNK_ITEMS          within REQUEST_BYTES; its entry and its items fill one atomic batch of 1,000
attempt records    MAX_ATTEMPT_RECORDS  the last attempts of a call
timeout            LONGEST_TIMEOUT_S    the longest that a caller may request
integer            LARGEST_INTEGER      such as a size in bytes; the limit of the message encoding
"""

from __future__ import annotations

MESSAGE_BYTES = 8 << 20
HEADER_BYTES = 512 << 10  # reserved for the header: ids, and an error with its traceback
INLINE_BYTES = MESSAGE_BYTES - HEADER_BYTES
REQUEST_BYTES = 64 << 20
LARGE_BODY_BYTES = REQUEST_BYTES
CHECKPOINT_BYTES = 4 << 20
PROGRESS_CHARS = 500
RECORD_BYTES = 1 << 20
LIVE_BYTES = 4 << 20  # for the previews of one attempt, each with LIVE_OVERHEAD_BYTES
LIVE_OVERHEAD_BYTES = 256
CHUNK_ITEMS = 999
MAX_ATTEMPT_RECORDS = 20
DEAD_LETTERS_AT_ONCE = 1000  # listed or replayed by one request
LONGEST_TIMEOUT_S = 7 * 86_400.0
LARGEST_INTEGER = (1 << 63) - 1


def inline_bytes(max_payload: int) -> int:
    """Return the largest body of a call on a server whose messages are limited to `max_payload` bytes.

    >>> inline_bytes(MESSAGE_BYTES) == INLINE_BYTES, inline_bytes(1 << 20), inline_bytes(64 << 10)
    (True, 524288, 32768)
    """
    return min(INLINE_BYTES, max(max_payload - HEADER_BYTES, max_payload // 2))
