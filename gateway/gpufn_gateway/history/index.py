"""A gateway's copy of the stream HISTORY, in SQLite. Blocking: it runs in its own thread.

Points are stored by resolution, slot and subject: writing ten seconds touches a few pages, and reading a subject is one
look-up per slot. The sequence of the last message is stored in the same transaction as its points, so that a message
counts once, whatever is killed when.

The copy can be rebuilt from the stream: a file that SQLite cannot read is moved aside.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from gpufn_core.protocol import subjects
from gpufn_gateway.history.blocks import HOUR, MINUTE, RESOLUTIONS, SECONDS_10, Block, Event, decode_block, decode_event
from gpufn_gateway.history.fields import Point, Points, merge, pack, unpack
from gpufn_gateway.history.query import KEPT_S
from gpufn_gateway.history.revisions import expand
from gpufn_platform.bus.storage.ordered_reader import StoredMessage

log = logging.getLogger(__name__)

# For the points of each resolution.
MAX_BYTES: Final[Mapping[int, int]] = {SECONDS_10: 4 << 20, MINUTE: 9 << 20, HOUR: 18 << 20}
_ROW_BYTES: Final = 16  # in addition to the value of a point
MAX_EVENTS: Final = 20_000
_CACHE_KIB: Final = 1024
_VERSION: Final = 1
_MAX_GATEWAYS: Final = 64  # per home
_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS state(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS subjects(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS points(
    resolution INTEGER NOT NULL, slot INTEGER NOT NULL, subject INTEGER NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (resolution, slot, subject)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unpublished(
    resolution INTEGER NOT NULL, slot INTEGER NOT NULL, PRIMARY KEY (resolution, slot)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events(seq INTEGER PRIMARY KEY, subject TEXT NOT NULL, value BLOB NOT NULL);
"""
_ADDED: Final = ("added_slot", "added_by", "added_seq")
_SIZES: Final = ("page_count", "freelist_count", "page_size")
_READ: Final = """
WITH RECURSIVE slots(slot) AS (SELECT ? UNION ALL SELECT slot + 1 FROM slots WHERE slot < ?)
SELECT points.slot, points.subject, points.value FROM slots CROSS JOIN points
WHERE points.resolution = ? AND points.slot = slots.slot AND points.subject IN ({})
"""

_encode: Final = msgspec.msgpack.Encoder().encode
_point: Final = msgspec.msgpack.Decoder(dict[int, Any])


def is_damage(error: Exception) -> bool:
    """Return whether the file itself is damaged, rather than the disk full or the file locked."""
    return isinstance(error, sqlite3.DatabaseError) and getattr(error, "sqlite_errorcode", 0) in _DAMAGE


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner can read. SQLite gives its other files the same mode."""
    return os.open(path, flags, 0o600)


class Index:
    """Each gateway of a home has its own file in `folder`. After a restart it gets any of them: all are copies."""

    def __init__(self, folder: Path, max_bytes: Mapping[int, int] = MAX_BYTES) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._lock: IO[bytes] | None = None
        self._max_bytes = max_bytes
        self._db: sqlite3.Connection | None = None
        self._subjects: dict[str, int] = {}

    def open(self, stream: str) -> None:
        """Open the file for the stream of this identity. A copy of another stream is emptied; a damaged file is moved
        aside. Raises sqlite3.Error, OSError."""
        path = self._path or self._claim()
        try:
            self._open(path)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self.move_aside(str(error))
            self._open(path)
        if self._state("stream") != stream:
            with self._connection as db:
                for table in ("points", "unpublished", "events", "subjects", "state"):
                    db.execute(f"DELETE FROM {table}")  # noqa: S608
                db.execute("INSERT INTO state VALUES ('stream', ?)", (stream,))
            self._subjects = {}

    def _claim(self) -> Path:
        """Return the first file that no other gateway holds, and hold it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for number in range(_MAX_GATEWAYS):
            lock = open(self._folder / f"{number}.lock", "wb", opener=_private)  # noqa: SIM115
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            self._lock, self._path = lock, self._folder / f"{number}.db"
            return self._path
        raise OSError(f"{_MAX_GATEWAYS} gateways use {self._folder}: give some of them another GPUFN_HOME")

    def _open(self, path: Path) -> None:
        if self._db is not None:
            self._db.close()
        os.close(_private(str(path), os.O_RDWR | os.O_CREAT))
        db = self._db = sqlite3.connect(path, timeout=2.0, check_same_thread=False)
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        db.execute("PRAGMA journal_size_limit = 4194304")
        if db.execute("PRAGMA user_version").fetchone()[0] not in (0, _VERSION):  # a file of another release
            db.close()
            path.unlink()
            return self._open(path)
        db.executescript(_SCHEMA)
        db.execute(f"PRAGMA user_version = {_VERSION}")
        self._subjects = dict(db.execute("SELECT name, id FROM subjects"))
        return None

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        if self._lock is not None:
            self._lock.close()
            self._lock = self._path = None

    def move_aside(self, reason: str) -> None:
        """Move a damaged file aside, in place of an earlier one. The next `open` starts with an empty copy."""
        if self._db is not None:
            self._db.close()
            self._db = None
        if (path := self._path) is None:
            return
        damaged = path.with_name(f"{path.name}.damaged")
        log.warning("the history in %s is damaged (%s): it is now %s, and is read anew", path, reason, damaged.name)
        path.rename(damaged)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise sqlite3.OperationalError("the history is not open")
        return self._db

    # --- write ---

    def apply(self, messages: Sequence[StoredMessage]) -> None:
        """Add messages of the stream, in order, in one transaction."""
        try:
            with self._connection as db:
                for message in messages:
                    self._apply(db, message)
                if messages:
                    db.execute("INSERT OR REPLACE INTO state VALUES ('seq', ?)", (messages[-1].seq,))
        except BaseException:
            self._subjects = {}  # new subjects of the transaction were rolled back
            raise

    def _apply(self, db: sqlite3.Connection, message: StoredMessage) -> None:
        if message.seq <= self.seq:
            return
        try:
            if message.subject == subjects.HISTORY_EVENTS:
                event = decode_event(message.payload)
                db.execute(
                    "INSERT OR REPLACE INTO events VALUES (?, ?, ?)", (message.seq, event.subject, message.payload)
                )
                return
            block = decode_block(message.payload)
        except (msgspec.MsgspecError, zlib.error) as error:
            log.warning("message %d of the history cannot be read: %s", message.seq, error)
            return
        if block.resolution == SECONDS_10:
            self._add(db, block)
            values = (block.slot, block.gateway, message.seq)
            for key, value in zip(_ADDED, values, strict=True):
                db.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (key, value))
        elif block.resolution in RESOLUTIONS:
            if not block.part:
                db.execute("DELETE FROM points WHERE resolution = ? AND slot = ?", (block.resolution, block.slot))
            self._put(db, block.resolution, block.slot, block.points)
            db.execute("DELETE FROM unpublished WHERE resolution = ? AND slot = ?", (block.resolution, block.slot))

    def _add(self, db: sqlite3.Connection, block: Block) -> None:
        for resolution in RESOLUTIONS:
            slot = block.slot * SECONDS_10 // resolution
            collapsed = self.points_at(resolution, slot)
            if not collapsed and resolution == SECONDS_10:
                self._put(db, resolution, slot, block.points)
                continue
            stored, added = expand(collapsed), expand(block.points)
            changed = {
                subject: point
                for subject, point in stored.items()
                if subject in added or (subject not in collapsed and subject.partition("@")[0] in added)
            }
            for subject, point in added.items():
                merge(changed.setdefault(subject, {}), point)
            self._put(db, resolution, slot, changed)
            if resolution != SECONDS_10:
                db.execute("INSERT OR IGNORE INTO unpublished VALUES (?, ?)", (resolution, slot))

    def _put(self, db: sqlite3.Connection, resolution: int, slot: int, points: Mapping[str, Point]) -> None:
        rows = ((resolution, slot, self._id(db, name), _encode(pack(point))) for name, point in points.items())
        db.executemany("INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?)", rows)

    def _id(self, db: sqlite3.Connection, name: str) -> int:
        if not self._subjects:
            self._subjects = dict(db.execute("SELECT name, id FROM subjects"))
        if (known := self._subjects.get(name)) is None:
            known = self._subjects[name] = db.execute("INSERT INTO subjects(name) VALUES (?)", (name,)).lastrowid or 0
        return known

    def prune(self, now: float) -> None:
        """Remove points that are too old, and the oldest of a resolution that takes more than its part of the file."""
        with self._connection as db:
            for resolution, kept_s in KEPT_S.items():
                oldest = (int(now - kept_s) // resolution,)
                db.execute(f"DELETE FROM points WHERE resolution = {resolution} AND slot < ?", oldest)  # noqa: S608
                self._shrink(db, resolution, self._max_bytes[resolution])
            db.execute("DELETE FROM unpublished WHERE slot * resolution < ?", (now - max(KEPT_S.values()),))
            db.execute(
                "DELETE FROM events WHERE seq <= (SELECT seq FROM events ORDER BY seq DESC LIMIT 1 OFFSET ?)",
                (MAX_EVENTS,),
            )
            db.execute("DELETE FROM subjects WHERE id NOT IN (SELECT DISTINCT subject FROM points)")
            self._subjects = {}
        self._connection.execute("PRAGMA incremental_vacuum").fetchall()

    def _shrink(self, db: sqlite3.Connection, resolution: int, most: int) -> None:
        size = "SELECT slot, sum(length(value) + ?) FROM points WHERE resolution = ? GROUP BY slot ORDER BY slot DESC"
        total = 0
        for slot, count in db.execute(size, (_ROW_BYTES, resolution)):
            total += count
            if total > most:
                db.execute("DELETE FROM points WHERE resolution = ? AND slot <= ?", (resolution, slot))
                return

    # --- read ---

    def _state(self, key: str) -> Any:
        row = self._connection.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    @property
    def seq(self) -> int:
        """The sequence of the last message."""
        return int(self._state("seq") or 0)

    def last_added(self) -> tuple[int, str, int]:
        """Return slot, gateway and sequence of the last ten seconds."""
        return (
            int(self._state("added_slot") or 0),
            str(self._state("added_by") or ""),
            int(self._state("added_seq") or 0),
        )

    def used_bytes(self) -> int:
        db = self._connection
        pages, unused, size = (db.execute(f"PRAGMA {each}").fetchone()[0] for each in _SIZES)
        return int((pages - unused) * size)

    def unpublished(self, before: float) -> list[tuple[int, int]]:
        """Return resolution and slot of the spans that ended before this time and have no message yet."""
        query = "SELECT resolution, slot FROM unpublished WHERE (slot + 1) * resolution <= ? ORDER BY 1, 2 LIMIT 100"
        return list(self._connection.execute(query, (before,)))

    def points_at(self, resolution: int, slot: int) -> Points:
        """Return the points of all subjects in a slot."""
        query = (
            "SELECT subjects.name, points.value FROM points JOIN subjects ON subjects.id = points.subject "
            "WHERE resolution = ? AND slot = ?"
        )
        rows = self._connection.execute(query, (resolution, slot))
        return {name: unpack(_point.decode(value)) for name, value in rows}

    def read(self, resolution: int, first: int, last: int, names: Iterable[str]) -> dict[int, Points]:
        """Return the points of these subjects by slot, from `first` to `last`."""
        known = dict(self._connection.execute("SELECT name, id FROM subjects"))
        wanted = {known[name]: name for name in names if name in known}
        if not wanted or last < first:
            return {}
        query = _READ.format(",".join("?" * len(wanted)))
        found: dict[int, Points] = {}
        for slot, subject, value in self._connection.execute(query, (first, last, resolution, *wanted)):
            found.setdefault(slot, {})[wanted[subject]] = unpack(_point.decode(value))
        return found

    def first_slot(self, resolution: int) -> int | None:
        row = self._connection.execute("SELECT min(slot) FROM points WHERE resolution = ?", (resolution,)).fetchone()
        return None if row[0] is None else int(row[0])

    def known(self, names: Iterable[str]) -> set[str]:
        """Return the subjects that have a history."""
        query = "SELECT count(*) FROM subjects WHERE name = ?"
        return {name for name in names if self._connection.execute(query, (name,)).fetchone()[0]}

    def names(self, prefix: str) -> list[str]:
        """Return the subjects that start with `prefix`."""
        rows = self._connection.execute("SELECT name FROM subjects WHERE substr(name, 1, ?) = ?", (len(prefix), prefix))
        return sorted(name for (name,) in rows)

    def events(self, before: int, most: int) -> list[tuple[int, Event]]:
        """Return up to `most` events with a smaller number, the newest first."""
        query = "SELECT seq, value FROM events WHERE seq < ? ORDER BY seq DESC LIMIT ?"
        return [(seq, decode_event(value)) for seq, value in self._connection.execute(query, (before, most))]
