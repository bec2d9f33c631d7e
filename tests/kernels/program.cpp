// Runs the entries of one kernel table, that of ATTNJOURNEY_ISA, on given tensors: program CALL DTYPE < inputs >
// results.
#include "program.h"

int main(int argc, char** argv) try {
  using namespace kernel_tests;
  const std::map<std::string, Types> types = {
      {"float64", {0, 8, 8}}, {"float32", {1, 4, 4}}, {"bfloat16", {2, 2, 4}}, {"float16", {3, 2, 4}}};
  const std::map<std::string, void (*)(const Inputs&, const Types&)> calls = {{"attention", attention},
                                                                              {"decode", decode},
                                                                              {"head_product", head_product},
                                                                              {"quantized_row", quantized_row},
                                                                              {"linear", linear},
                                                                              {"gated", gated},
                                                                              {"sparse", sparse},
                                                                              {"indexer", indexer},
                                                                              {"indexer_loss", indexer_loss}};
  if (argc != 3 || !calls.count(argv[1]) || !types.count(argv[2])) throw std::runtime_error("program CALL DTYPE");
  calls.at(argv[1])(Inputs(), types.at(argv[2]));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
