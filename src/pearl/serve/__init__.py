"""A model for people in a browser and for programs over HTTP. Needs the extra `serve` (FastAPI, uvicorn).

`app.create_app` is the application, `run.serve` what `pearl serve` calls. Photos are decoded to pixels in memory, and
reach the process that learns through a pipe: none is ever written to a disk.
"""
