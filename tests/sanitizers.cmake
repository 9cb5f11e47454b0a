# Tests that run under AddressSanitizer with UndefinedBehaviorSanitizer and under ThreadSanitizer, where a test takes ten times as long:
# those of faults that they have found in this project, or are there for. These are kernels and codecs of the CPU, kernels of CUDA on the
# executor, the allocator, exchanges and the store, the tape, shards, bytes of others (files, texts, frames) and the errors about them.
# Sweeps over recipes, layouts, shapes and plans take the same paths again: the suite without a sanitizer has them. -DMANTISSA_ALL_TESTS=ON
# runs all tests of the labels unit and threads.
#   sanitized: the executables; sources_of_NAME: the files of one; only_of_NAME: its filter of GoogleTest, whose elements are joined by colons;
#   environment_of_NAME: the environment that it is started with
option(MANTISSA_ALL_TESTS "under a sanitizer, all tests of units and threads and not only those of tests/sanitizers.cmake" OFF)

set(sanitized "")
if(MANTISSA_ALL_TESTS)
elseif(CMAKE_CXX_FLAGS MATCHES "-fsanitize=address")
  set(sanitized thread_tests layer_tests backend_tests model_tests fuzz_tests simt_tests)
  set(sources_of_layer_tests base/parallel base/printable base/log base/text base/trace io/safetensors_hostile io/safetensors text/* data/* optim/shards
    optim/optimizer checkpoint/checkpoint_boxes checkpoint/ranks_together hf/tile_scales metrics/append_file metrics/event_file metrics/run_trace)
  set(only_of_layer_tests -*ParallelFor.*/0:HostileJsonl.TakesMemory*:Permutation.IsABij*:HostileSafetensors.Crowds*:SplitPattern.ALiteral*)
  set(sources_of_model_tests ops/tape ops/empty_share ops/permuted_tokens ops/moe_trace ops/split_ops train/generate train/training_step train/step_batches
    train/pending_exports train/run_exports train/device_batch)
  set(only_of_model_tests PickToken.*:GenerateTest.*:*BatchTest.EachPrompt*/mxfp8_bf16_experts:*BatchTest.AnySeq*/mxfp4_qat_bf16:TrainingStepTest.*
    StepBatchesTest.*:TakenBatches.*:ExportsAskedFor.*:*FromRanks.*/mxfp8_gather:ExportsOfRuns.EndWith*:ExportsOfRuns.Leftovers*:DeviceBatchTest.*
    TapeTest.*:RecomputeTest.*:*EmptyShare.*:*PermutedTokens.*/mxfp8:*PermutedTokens.*/high:*PermutedTokens.*/shifted:MoeTrace.*:*SplitOps.*/*_33_tokens
    SplitCrossEntropy.Takes*)
  set(sources_of_backend_tests backend/allocator backend/few_rows backend/packed_gemm backend/operands backend/quantized_gemm)
  set(only_of_backend_tests CachingAllocator.*:FewRowsTest.*:PackBlock.*:*Tiles.ARow*:*Tiles.AreStored*:FewRowsOfGemms.Outside*:*OperandsTest.*:*Kernels.FastPath*
    QuantizationBits.*:*AttentionBlocks.*:QuantizedGemm.*-FewRowsTest.DecodeEveryCodeExactly:QuantizationBits.QuantizeOfAnyPattern*
    QuantizationBits.Requantize*:*AttentionBlocks.AgreeWithFp64*:QuantizedGemm.Holds*:QuantizedGemm.Equals*:QuantizedGemm.FindsAn*:OperandsTest.AreGuarded*)  # these write beside their operands
  set(only_of_simt_tests *OneCase.*:*AmongLanes.*:ManyThreads.*:*OnTensorCores.*:BoundsDeathTest.*:KernelEdges.*:FlashAttention.OfAny*:FlashAttention.OfACache*
    FlashAttention.HasBitsThatDoNotDependOnTheAddress:*GroupGemm.OfCodes*:*GroupGemm.OfWeights*:MmaGemm.*:CudaLanes.*:ErrorWord.Names*-KernelEdges.NormsHave*
    ErrorWord.NamesStarts*:ErrorWord.NamesTheFirst*)
elseif(CMAKE_CXX_FLAGS MATCHES "-fsanitize=thread")
  set(sanitized thread_tests simt_tests)
  set(sources_of_thread_tests comm/comm_queue comm/comm comm/device_collectives job/* base/parallel base/log base/trace backend/allocator)
endif()
# The first 16 MiB of new memory are NaN in each format that has one, and a stack that a function has left is nobody's: but for the executor, which has a
# stack for each thread of a kernel.
if(CMAKE_CXX_FLAGS MATCHES "-fsanitize=address")
  foreach(name thread layer backend model fuzz)
    set(environment_of_${name}_tests ASAN_OPTIONS=detect_stack_use_after_return=1:max_malloc_fill_size=16777216:malloc_fill_byte=255)
  endforeach()
endif()
