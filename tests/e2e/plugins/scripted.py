"""A logits processor that makes an engine say what a request asks it to say.

The token ids stand in the request's ``vllm_xargs`` as ``script``; the text behind them is the model's own. Where the
prompt already ends with the first ids of the script (the answer is continued by another engine), they are not said
again. Log-probabilities are those of the model, as vLLM takes them before logits are processed.
"""

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Scripted(AdapterLogitsProcessor):
    @classmethod
    def validate_params(cls, sampling_params):
        script = (sampling_params.extra_args or {}).get("script", [])
        if not isinstance(script, list) or not all(isinstance(token, int) for token in script):
            raise ValueError("`script` must be a list of token ids")

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        script = (params.extra_args or {}).get("script")
        if not script:
            return None

        def force(prompt_ids, output_ids, logits):
            position = said(script, prompt_ids) + len(output_ids)
            if position < len(script):
                logits.fill_(float("-inf"))
                logits[script[position]] = 0.0
            return logits

        return force


def said(script, prompt_ids):
    """How many of the script's ids the prompt already ends with."""
    longest = min(len(script) - 1, len(prompt_ids))
    return next((length for length in range(longest, 0, -1) if prompt_ids[-length:] == script[:length]), 0)
