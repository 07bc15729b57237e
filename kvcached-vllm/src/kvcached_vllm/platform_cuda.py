"""vLLM's CUDA platform with elastic KV cache."""

from vllm.platforms.cuda import CudaPlatform

from kvcached_vllm import qualnames
from kvcached_vllm.platform import ElasticPlatform


class ElasticCudaPlatform(ElasticPlatform, CudaPlatform):
    """Whatever vLLM's own is, ``is_cuda()`` included."""

    stock_worker = qualnames.STOCK_CUDA_WORKER
    elastic_worker = qualnames.CUDA_WORKER
