# Cases of sweeps over layouts of ranks, recipes on them and shapes of GEMMs that have the label slow, as filters of GoogleTest by executable.
# What the suite keeps takes the same paths, but for what is said here. A new case of a sweep is in the suite.

set(slow_of_ops_tests SplitOps.*_columns_4_ranks_33_tokens SplitOps.HaveTheGradientsOfCentralDifferences/experts_columns_4_ranks_0_tokens)
set(slow_of_backend_tests GemmShapes.*/2 GemmShapes.*/3 GemmShapes.*/4 GemmShapes.*/5)
set(slow_of_plan_tests PlannedBytesOfTensorRanks.*/dp1tp2ep1 PlannedBytesOfTensorRanks.*/dp1tp4spep1 PlannedBytesOfTensorRanks.*/dp2tp2ep1
  PlannedBytesOfExpertRanks.*/dp2tp1ep2 PlannedBytesOfExpertRanks.*/dp4tp1ep4 PlannedBytesOfExpertRanks.*/dp2tp2ep2
  RankMemoryOf.*/dp1tp2 RankMemoryOf.*/dp1tp4 RankMemoryOf.*/dp1tp4sp RankMemoryOf.*/dp2tp2sp)

set(slow_of_train_tests "")
foreach(case bf16 mxfp8 te)
  list(APPEND slow_of_train_tests ExpertRanks.*/${case})
endforeach()
foreach(case bias values simulated fp8_block)
  list(APPEND slow_of_train_tests ExpertRanks.Learn*/${case} ExpertRanks.Continue*/${case})
endforeach()

# The suite has mxfp8_te on tensor ranks in ops_tests only, and simulated and fake-quantized experts on ranks that do not share layers.
set(slow_of_distributed_tests "")
foreach(case bf16 mxfp8 mxfp8_te)
  list(APPEND slow_of_distributed_tests TensorRanks.*/${case})
endforeach()
foreach(case experts experts_simulated experts_qat)
  list(APPEND slow_of_distributed_tests OfExperts/TensorRanksWithExperts.*/${case})
endforeach()
foreach(test HaveTheBits Start Save)
  list(APPEND slow_of_distributed_tests TensorRanks.${test}*/fp8_block OfExperts/TensorRanksWithExperts.${test}*/experts_router)
endforeach()

# Each layout and each model has another case.
set(slow_of_integration_tests "")
foreach(case alone_qat alone_softmax alone_fp8_block dp2_mxfp8 dp2_sigmoid dp4_gather tp2_mxfp8 tp2_sp_high ep2_softmax ep2_biases dp2_ep2_sigmoid)
  list(APPEND slow_of_integration_tests Layouts/DevicesOnRanks.*/${case})
endforeach()
