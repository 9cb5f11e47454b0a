# The executable with the tests of a source file, and a filter that chooses these.
function(mantissa_tests_of name executable filter)
  file(GLOB source ${CMAKE_CURRENT_SOURCE_DIR}/*/${name}.cpp)
  cmake_path(GET source PARENT_PATH folder)
  cmake_path(GET folder FILENAME folder)
  file(STRINGS ${source} lines REGEX "^TEST(_F|_P)?[(]")
  list(TRANSFORM lines REPLACE "^TEST[_FP]*[(]([A-Za-z0-9_]+),.*$" "\\1.*:*/\\1.*")
  list(REMOVE_DUPLICATES lines)
  list(JOIN lines ":" lines)
  set(${executable} ${executable_of_${folder}} PARENT_SCOPE)
  set(${filter} ${lines} PARENT_SCOPE)
endfunction()

# Runs tests as on other CPUs than the one at hand (under.sh; CONTRIBUTING.md has a table): those of GEMMs, of bits under padding, of
# estimates of memory, and of ranks. An entry is NAME for the tests of NAME.cpp, or NAME=FILTER with a filter of GoogleTest for some of
# them.
function(mantissa_under setting suffix label)
  mantissa_limit(${label} timeout)
  foreach(entry ${ARGN})
    string(REGEX MATCH "^([^=]*)=?(.*)$" entry "${entry}")
    set(name ${CMAKE_MATCH_1})
    set(filter ${CMAKE_MATCH_2})
    mantissa_tests_of(${name} executable all)
    if(NOT filter)
      set(filter ${all})
    endif()
    add_test(NAME ${name}_${suffix} COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/under.sh $<TARGET_FILE:mantissa> ${setting} $<TARGET_FILE:${executable}>
             --gtest_filter=${filter})
    set_tests_properties(${name}_${suffix} PROPERTIES LABELS ${label} TIMEOUT ${timeout} SKIP_RETURN_CODE 77
      FAIL_REGULAR_EXPRESSION "Running 0 tests" COST 100)  # long ones begin first
  endforeach()
endfunction()

# These take less than 60 seconds of two cores together, without those labeled slow.
set(ranks permuted_tokens_test expert_ranks_test=ExpertRanks.HaveTheBitsOfOne/fp32)

# The library: AVX2 and AVX512_CORE widen bf16, each in kernels of its own.
foreach(isa AVX2 AVX512_CORE AVX512_CORE_BF16)
  string(TOLOWER ${isa} suffix)
  mantissa_under(ONEDNN_MAX_CPU_ISA=${isa} under_${suffix} ${unit_alone} quantized_gemm_test quantized_linear_test kernels_test=Kernels.*Gemm*
    moe_kernels_test=RowsOfGroups.*/*64:RowsOfGroups.*/*400 packed_gemm_test subnormals_test=SubnormalOperands.Reach* gemm_scratch_test
    training_step_test=Estimate.*)
  mantissa_under(ONEDNN_MAX_CPU_ISA=${isa} under_${suffix} integration padding_test=Padding.ChangesNoBit* ${ranks}
    tensor_ranks_test=TensorRanks.TakeTheFirstStepOfOne/mxfp8)
  mantissa_under(ONEDNN_MAX_CPU_ISA=${isa} all_under_${suffix} slow kernels_test gemm_shapes_test moe_kernels_test subnormals_test padding_test training_step_test
    rank_memory_test permuted_tokens_test expert_ranks_test tensor_ranks_test shipped_configs_test)
endforeach()
mantissa_under(ONEDNN_MAX_CPU_ISA=AVX2 under_avx2 ${unit_alone} gemm_shapes_test=GemmShapes.*/1)

# Our own kernels, whose bits cpu_levels_test compares as well.
foreach(level x86-64-v3 x86-64)
  mantissa_under(MANTISSA_MAX_CPU_LEVEL=${level} under_${level} integration padding_test=Padding.ChangesNoBit* ${ranks})
  mantissa_under(MANTISSA_MAX_CPU_LEVEL=${level} all_under_${level} slow kernels_test attention_blocks_test moe_kernels_test
    quantization_bits_test quantization_invariants_test padding_test training_step_test expert_ranks_test tensor_ranks_test shipped_configs_test)
endforeach()
mantissa_under(MANTISSA_MAX_CPU_LEVEL=x86-64 under_x86-64 integration quantization_bits_test)

# Both at once on a CPU that has no more than AVX2, where an instruction too many is a signal. Thirty times slower, so small cases.
add_test(NAME doctor_under_qemu COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/under.sh $<TARGET_FILE:mantissa> qemu $<TARGET_FILE:mantissa> doctor)
set_tests_properties(doctor_under_qemu PROPERTIES LABELS integration TIMEOUT ${hang} SKIP_RETURN_CODE 77
  PASS_REGULAR_EXPRESSION "matmuls  oneDNN, AVX2;.*other kernels    x86-64-v3\n")
set(kernels Kernels.FastPath*/GroupedGemm_bf16:Kernels.FastPath*/*Norm*_bf16:Kernels.FastPath*/SwiGlu*_bf16:Kernels.FastPath*/AdamW_bf16)
mantissa_under(qemu under_qemu integration quantized_gemm_test=QuantizedGemm.Multiplies*:QuantizedGemm.Zero*:QuantizedGemm.Acc* kernels_test=${kernels}
  packed_gemm_test=Tiles.*Place* few_rows_test=FewRowsTest.HaveBits* padding_test=Padding.IsNeverStored/fp32)
mantissa_under(qemu all_under_qemu slow quantized_gemm_test kernels_test=Kernels.FastPath* moe_kernels_test=RowsOfGroups.*/*64:RowsOfGroups.*/*400
  padding_test=Padding.ChangesNoBit* training_step_test=Estimate.* permuted_tokens_test)
