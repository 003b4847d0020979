"""vLLM's engine, models, quantisation and parallelism without its front-end; the only importer of vllm.

replica.py   the Replica: lifecycle, restarts, submit and cancel      imports no vllm until it starts
router.py    several replicas as one
options.py   evap's options and --vllm-arg -> vLLM's configuration
mapping.py   a GenerateRequest -> what vLLM takes, and what is refused before it
runs.py      which engine request is which slot; rows -> TokenBatch    no I/O
client.py    seam "core": EngineCore's client below AsyncLLM
llm.py       seam "async-llm": the fall-back for releases that the core client does not fit
shared.py    shared memory, doorbell and log pipe between this process and the engine's
scheduler.py runs in the engine process: final tokens into the ring    (--token-path scheduler)
worker.py    runs in the worker process: the meter, right after sampling
names.py     every name of vLLM that is used here, and a test that they still mean what they did
"""
