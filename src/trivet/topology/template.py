"""The commented topology that ``trivet topology init`` writes; as it stands, the demo's."""

TEMPLATE = """\
# A Trivet topology: which engines exist, where, and with what flags.
# `trivet topology show FILE` prints what it resolves to and each engine's exact vLLM command.

model:
  name: demo                  # SmolLM2-135M-Instruct; a Hugging Face folder or hub name works the same way
  # tokenizer: ./tokenizer    # another than the model's own
  # served_names: [my-model]  # what clients ask for; else the model's name
  # dtype: bfloat16           # CPU engines: float32 unless given
  max_length: 4096            # longest prompt plus answer, in tokens; equal on all tiers

kv:
  connector: TrivetConnector  # moves KV while prefill computes, within one host; NixlConnector: also between hosts
  # options:                  # its kv_connector_extra_config
  #   lease_s: 60             # seconds that prefill holds KV for decode

# flags: [--trust-remote-code]        # vLLM flags for every engine and for rendering; a mapping works too
# env: {VLLM_LOGGING_LEVEL: DEBUG}    # environment of every engine

tiers:
  render:                     # chat templates, tokenizing, detokenizing, tool and reasoning parsers: on CPU
    # flags: {tool-call-parser: hermes, enable-auto-tool-choice: true}
    # env: {}                 # of the gateway's workers
    # cache_mib: 64           # of each worker, for token ids of text that came before
    # fast_tokenizer: auto    # off: the reference, tokenizers, alone
    # servers: ["http://127.0.0.1:9000"]  # `trivet render FILE`: make token ids of prompts in the workers' place
  prefill:
    replicas: 1
    # device: cuda            # cpu, cuda or sim (simulated); else what the installed vLLM is built for
    # gpus: [0]               # for each engine; else the next free ones
    # tensor_parallel: 1
    # gpu_memory_utilization: 0.9
    # flags: {max-num-batched-tokens: 32768}
    # env: {}
  decode:
    replicas: 1
    # engines:                # a list instead of replicas, when engines differ
    #   - name: decode-a
    #     gpus: [1]
    #   - name: decode-b      # on another host (NixlConnector): run `trivet engine decode-b FILE` there
    #     host: node-2
    #     port: 8100
    #   - url: http://10.0.0.7:8000   # started by someone else
  # mixed:                    # engines that do both, for what is served colocated
  #   replicas: 1

gateway:
  host: 127.0.0.1             # 0.0.0.0 to be reached from other hosts
  port: 8000
  workers: 1                  # processes
  # api_keys: [change-me]     # clients must send one: Authorization: Bearer change-me
  drain_s: 30                 # how long running requests may take after a stop
  # plane: text               # engines render by themselves, and their bytes are passed through
  # split: always             # whatever that costs; auto splits where it pays, never does not
  # guard: {every_s: 60}      # canaries through each pair, so that a bad one gets no request; off: none
  # limits: {running: 1024, queued: 1024, queue_s: 30, deadline_s: 600, silence_s: 300, unread_s: 60, body_mib: 64}
  # allow: []                 # what clients may say of how KV is moved; nothing, as it can end an engine
"""
