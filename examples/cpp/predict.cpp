// Prints the class of a photograph, with the file that examples/05_predictor.py writes.
//
//     predict predictor.pt photograph.ppm        binary PPM: `convert photograph.jpg
//     photograph.ppm`

#include <torch/script.h>

#include <cstdint>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>

namespace {

// Returns (3, height, width), uint8.
torch::Tensor read_ppm(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string kind;
  int64_t width = 0, height = 0, brightest = 0;
  file >> kind >> width >> height >> brightest;
  file.get();  // one white space ends the header
  if (!file || kind != "P6" || brightest != 255 || width <= 0 || height <= 0) {
    throw std::runtime_error(path + " is not a binary PPM file with 8 bits for each colour");
  }
  torch::Tensor pixels = torch::empty({height, width, 3}, torch::kUInt8);
  file.read(static_cast<char*>(pixels.mutable_data_ptr()), pixels.numel());
  if (!file) throw std::runtime_error(path + " ends too early");
  return pixels.permute({2, 0, 1});
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) {
    std::cerr << "usage: " << words[0] << " PREDICTOR PHOTOGRAPH\n";
    return 2;
  }
  try {
    const c10::InferenceMode inference;
    torch::jit::Module predictor = torch::jit::load(words[1], torch::kCPU);
    const torch::Tensor number = predictor.forward({read_ppm(words[2])}).toTensor();
    std::cout << "class " << number.item<int64_t>() << '\n';
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
