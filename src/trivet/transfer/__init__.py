"""TrivetConnector: moves KV from a prefill engine to a decode engine while prefill still computes.

It runs inside vLLM's processes (``kv_connector_module_path: trivet.transfer.connector``). An engine has one scheduler
side, which decides, and one worker side a rank, which moves:

    scheduler side   ``prefill.py`` <-- link (Unix socket, ``messages.py``) --> ``decode.py``
                          |  a plan a step (``plan.py``)                             |
    worker side      ``sender.py``  <-- data link, and a mover's memory -->     ``receiver.py``

docs/kv-transfer.md tells the protocol. Nothing here is imported by the rest of Trivet.
"""
