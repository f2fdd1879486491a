"""A folder of MLflow as a function: its `pyfunc` serves the JSON of MLflow's own scoring server.

The folder is sent as weights. Neither MLflow nor the model is loaded on the machine of the deployer.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_APP = '''"""A model of MLflow. `gpufn deploy` wrote this file."""

import io
import json
from typing import Any

from gpufn import Weights, enter, gpu_function, method

MODEL = Weights("model")


@gpu_function(weights=MODEL, **{options!r})
class Model:
    @enter
    def load(self) -> None:
        import mlflow.pyfunc
        from mlflow.pyfunc import scoring_server

        self.model = mlflow.pyfunc.load_model(str(MODEL.path))
        self.server = scoring_server

    @method
    def predict(
        self,
        dataframe_split: Any = None,
        dataframe_records: Any = None,
        instances: Any = None,
        inputs: Any = None,
        params: dict[str, Any] | None = None,
    ) -> Any:
        given = {{
            "dataframe_split": dataframe_split,
            "dataframe_records": dataframe_records,
            "instances": instances,
            "inputs": inputs,
        }}
        data = {{name: value for name, value in given.items() if value is not None}}
        signature = self.model.metadata.signature
        schema = None if signature is None else signature.inputs
        result = self.model.predict(self.server.infer_and_parse_data(data, schema), params)
        text = io.StringIO()
        self.server.predictions_to_json(result, text)
        return json.loads(text.getvalue())
'''


@contextlib.contextmanager
def app_of(folder: Path, options: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a file that declares a function for the model. `options` are the options of `@gpu_function`, with the
    name."""
    with tempfile.TemporaryDirectory(prefix="gpufn-mlflow-") as parent:
        Path(parent, "model").symlink_to(folder.resolve(), target_is_directory=True)
        app = Path(parent, "mlflow_app.py")
        app.write_text(_APP.format(options={name: options[name] for name in sorted(options)}))
        yield app
