// Runs a saved model on random numbers, and prints its result and the time of a call.
//
//     run model.pt 1,3,224,224        a shape for each argument of the model

#include <ATen/Parallel.h>
#include <torch/script.h>

#include <algorithm>
#include <chrono>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::vector<int64_t> shape_of(const std::string& text) {
  std::vector<int64_t> shape;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) shape.push_back(std::stoll(word));
  return shape;
}

// A result is a tensor, or tensors in tuples and lists.
void print(const torch::IValue& value) {
  if (value.isTuple()) {
    for (const torch::IValue& element : value.toTupleRef().elements()) print(element);
  } else if (value.isList()) {
    for (const torch::IValue& element : value.toListRef()) print(element);
  } else if (!value.isTensor()) {
    std::cout << value << '\n';
  } else {
    const torch::Tensor& tensor = value.toTensor();
    std::cout << tensor.scalar_type() << tensor.sizes() << ':';
    const torch::Tensor numbers = tensor.flatten().to(torch::kDouble);
    for (int64_t i = 0; i < std::min<int64_t>(numbers.numel(), 8); ++i) {
      std::cout << ' ' << numbers[i].item<double>();
    }
    std::cout << (numbers.numel() > 8 ? " ...\n" : "\n");
  }
}

void run(const std::string& path, const std::vector<std::string>& shapes) {
  // Otherwise each operator outside of the compiled program would prepare for gradients.
  const c10::InferenceMode inference;
  torch::jit::Module model = torch::jit::load(path, torch::kCPU);

  torch::manual_seed(0);
  std::vector<torch::IValue> inputs;
  for (const std::string& shape : shapes) inputs.emplace_back(torch::rand(shape_of(shape)));

  print(model.forward(inputs));  // the first call maps the compiled code and packs the weights

  std::vector<double> milliseconds;
  for (int i = 0; i < 20; ++i) {
    const auto start = std::chrono::steady_clock::now();
    model.forward(inputs);
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    milliseconds.push_back(taken.count());
  }
  std::sort(milliseconds.begin(), milliseconds.end());
  std::cerr << "a call takes " << milliseconds[10] << " ms on " << at::get_num_threads()
            << " threads (median of 20)\n";
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) {
    std::cerr << "usage: " << words[0] << " MODEL SHAPE...    e.g. model.pt 1,3,224,224\n";
    return 2;
  }
  std::cout << std::setprecision(9);
  try {
    run(words[1], {words + 2, words + count});
  } catch (const c10::Error& error) {
    std::cerr << words[1] << ": " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << words[1] << ": " << error.what() << '\n';
    return 1;
  }
}
