"""Where vLLM finds our classes; it loads them by name, in the processes that need them."""

CUDA_PLATFORM = "kvcached_vllm.platform_cuda.ElasticCudaPlatform"
CPU_PLATFORM = "kvcached_vllm.platform_cpu.ElasticCpuPlatform"
CUDA_WORKER = "kvcached_vllm.worker_cuda.ElasticCudaWorker"
CPU_WORKER = "kvcached_vllm.worker_cpu.ElasticCpuWorker"
SCHEDULER = "kvcached_vllm.scheduler.ElasticScheduler"
ASYNC_SCHEDULER = "kvcached_vllm.scheduler.ElasticAsyncScheduler"

STOCK_CUDA_WORKER = "vllm.v1.worker.gpu_worker.Worker"
STOCK_CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
