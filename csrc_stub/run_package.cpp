// Runs a compressed model, an AOTInductor package, in a process without Python:
//   run_package MODEL.pt2 OUTPUT [SHAPE INPUT]...
// INPUT and OUTPUT are raw float32; SHAPE is its sizes joined by x: 4x256. The package's outputs
// follow one another in OUTPUT, their shapes are printed.
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::vector<int64_t> parse_shape(const std::string& text) {
  std::vector<int64_t> shape;
  std::istringstream sizes(text);
  for (std::string size; std::getline(sizes, size, 'x');) shape.push_back(std::stoll(size));
  return shape;
}

at::Tensor read(const std::string& path, const std::vector<int64_t>& shape) {
  at::Tensor tensor = at::empty(shape);
  std::ifstream file(path, std::ios::binary);
  file.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
  TORCH_CHECK(file && file.peek() == EOF, "input must be float32 of shape ", tensor.sizes(), " = ",
              tensor.nbytes(), " bytes, got another size in ", path, "; check SHAPE");
  return tensor;
}

void write(const std::string& path, const std::vector<at::Tensor>& tensors) {
  std::ofstream file(path, std::ios::binary);
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor stored = tensor.to(at::kFloat).contiguous();
    file.write(static_cast<const char*>(stored.data_ptr()),
               static_cast<std::streamsize>(stored.nbytes()));
    std::cout << tensor.sizes() << "\n";
  }
  TORCH_CHECK(file.flush(), "cannot write ", path, "; check the folder and its space");
}

void run(const std::vector<std::string>& arguments) {
  std::vector<at::Tensor> inputs;
  for (size_t i = 2; i < arguments.size(); i += 2)
    inputs.push_back(read(arguments[i + 1], parse_shape(arguments[i])));
  torch::inductor::AOTIModelPackageLoader loader(arguments[0]);
  write(arguments[1], loader.run(inputs));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc % 2 == 0) {
    std::cerr << "usage: run_package MODEL.pt2 OUTPUT [SHAPE INPUT]...\n";
    return 2;
  }
  try {
    run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << "run_package: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
