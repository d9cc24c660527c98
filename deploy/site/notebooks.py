"""`python deploy/site/notebooks.py`: run the notebooks of docs/guide/notebooks and store what they print and plot.

They share one folder and one system, which the first starts and the last stops.
"""

import html
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "guide" / "notebooks"
NAMES = ("your-data", "events", "models")
_SHELL = "%%bash\n"
_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def run(name: str, folder: Path) -> dict[str, Any]:
    """Return the notebook with its outputs. Raises: nbclient.exceptions.CellExecutionError with the cell."""
    import nbformat
    from nbclient import NotebookClient

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ.update(MPLBACKEND="module://matplotlib_inline.backend_inline", COLUMNS="100", NO_COLOR="1")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    NotebookClient(
        notebook, timeout=300, coalesce_streams=True, resources={"metadata": {"path": str(folder)}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = _TERMINAL.sub("", output.text)
    notebook.metadata.language_info = {"name": "python"}
    return dict(notebook)


def markdown(path: Path) -> str:
    """Return a stored notebook as a page: code, printed text, and plots as data within it."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        language = "bash" if source.startswith(_SHELL) else "python"
        parts.append(f"```{language}\n{source.removeprefix(_SHELL)}\n```")
        for output in cell["outputs"]:
            if text := "".join(output.get("text", [])):
                parts.append(f"<pre><code>{html.escape(text.rstrip())}</code></pre>")
            if image := "".join(output.get("data", {}).get("image/png", [])):
                image = image.replace("\n", "")
                parts.append(f'<img alt="plot" src="data:image/png;base64,{image}">')
    return "\n\n".join(parts) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            text = json.dumps(run(name, Path(folder)), indent=1, ensure_ascii=False)
            (FOLDER / f"{name}.ipynb").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
