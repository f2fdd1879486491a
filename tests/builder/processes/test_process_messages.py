from __future__ import annotations

from gpufn_builder.processes.process_messages import truncate_error
from gpufn_core.errors import BuildFailed, ErrorInfo


def test_an_error_is_one_line_whatever_a_models_nodes_are_called() -> None:
    error = BuildFailed("node a\nb\r\n is  else\twhere.Foo", stage="ingest", node="a\nb", log="line 1\nline 2")
    assert truncate_error(error.info()) == ErrorInfo(
        code="build_failed",
        message="node a b is else where.Foo",
        stage="ingest",
        node="a b",
        traceback="line 1\nline 2",
    )
