// Runs a compressed model, an AOTInductor package, in a process without Python:
//   run_package MODEL.pt2 OUTPUT [SHAPE INPUT]...
// INPUT is raw float32, or int64 after i64:, for token ids; SHAPE is its sizes joined by x: 4x256,
// i64:1x8. The package's outputs follow one another in OUTPUT as float32, their shapes are printed.
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

// A tensor without values for SHAPE.
at::Tensor parse_shape(const std::string& text) {
  const std::string integers = "i64:";
  const bool is_integer = text.rfind(integers, 0) == 0;
  std::vector<int64_t> shape;
  std::istringstream sizes(text.substr(is_integer ? integers.size() : 0));
  for (std::string size; std::getline(sizes, size, 'x');) {
    const bool is_size = !size.empty() && size.size() < 10 &&
                         size.find_first_not_of("0123456789") == std::string::npos;
    TORCH_CHECK(is_size, "SHAPE must be sizes joined by x, got ", text,
                "; write 4x256, or i64:1x8 for token ids");
    shape.push_back(std::stoll(size));
  }
  return at::empty(shape, is_integer ? at::kLong : at::kFloat);
}

std::ifstream open(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path, "; check the path");
  return file;
}

at::Tensor read(const std::string& path, at::Tensor tensor) {
  std::ifstream file = open(path);
  file.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
  const char* dtype = tensor.scalar_type() == at::kLong ? "int64" : "float32";
  TORCH_CHECK(file && file.peek() == EOF, "input must be ", dtype, " of shape ", tensor.sizes(),
              " = ", tensor.nbytes(), " bytes, got another size in ", path, "; check SHAPE");
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
  open(arguments[0]);
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
  } catch (const c10::Error& error) {  // its what() carries a backtrace
    std::cerr << "run_package: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "run_package: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
