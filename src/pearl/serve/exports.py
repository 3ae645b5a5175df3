"""The model as a program for use without pearl, to be downloaded."""

import io
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import Literal

from fastapi import FastAPI, HTTPException
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from pearl.errors import ExportError
from pearl.export import export_directory
from pearl.export.verbs import SUFFIX
from pearl.serve.openapi import problems
from pearl.serve.server import Server


def add_exports(app: FastAPI, server: Server) -> None:
    """Add the address of the exported model."""
    one = threading.Lock()

    def archive(to: Literal["onnx", "torch"], name: str) -> bytes:
        """Return a zip archive with the program and its model card; nothing else stays of them."""
        with one, tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / f"{name}{SUFFIX[to]}"
            export_directory(str(server.path), to=to, out=out, method=server.method)
            made = io.BytesIO()
            with zipfile.ZipFile(made, "w") as packed:
                for file in sorted(Path(folder).iterdir()):
                    packed.write(file, file.name)
            return made.getvalue()

    @app.get(
        "/v1/export",
        summary="Download the model as a program",
        response_class=Response,
        responses={200: {"content": {"application/zip": {}}}, **problems(400, 409)},
    )
    async def exported(to: Literal["onnx", "torch"] = "onnx") -> Response:
        """A zip archive with the program, which runs without pearl, and its model card."""
        name = str(server.about["name"])
        try:
            packed = await run_in_threadpool(archive, to, name)
        except ExportError as error:
            raise HTTPException(409, str(error).partition("\n")[0]) from None
        return Response(packed, media_type="application/zip")
