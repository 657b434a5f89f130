// Weight bytes, activation bytes and multiply-adds of a TorchScript file, without Python:
//
//     analyse MODEL.pt 1,3,224,224
//
// Every operator of one run is observed. A convolution and a product of matrices tell their multiply-adds by the
// shapes of their inputs; an operator's result is an activation unless it lies in storage that was there before.

#include <torch/script.h>

#include <ATen/record_function.h>

#include <cstdint>
#include <iostream>
#include <sstream>
#include <string>
#include <unordered_set>
#include <vector>

namespace {

std::int64_t macs = 0;
std::int64_t activations = 0;
std::unordered_set<const void*> known;
std::vector<at::Tensor> alive;  // so that no address is used again

void note(const at::Tensor& tensor) {
  if (known.insert(tensor.storage().unsafeGetStorageImpl()).second) {
    activations += static_cast<std::int64_t>(tensor.nbytes());
    alive.push_back(tensor);
  }
}

std::int64_t product(at::IntArrayRef sizes) {
  std::int64_t result = 1;
  for (const auto size : sizes) {
    result *= size;
  }
  return result;
}

// What an operator was called with; it can only be asked before the operator runs.
struct Called : at::ObserverContext {
  std::vector<c10::IValue> inputs;
};

int running = 0;  // operators within operators

std::int64_t macs_of(const std::string& name, const std::vector<c10::IValue>& inputs, const at::Tensor& result) {
  if (name == "aten::_convolution") {
    const bool transposed = inputs[6].toBool();  // each input element meets all weights of its channel
    const auto weight = inputs[1].toTensor().sizes().slice(1);
    return (transposed ? inputs[0].toTensor().numel() : result.numel()) * product(weight);
  }
  if (name == "aten::mm" || name == "aten::bmm") {
    return result.numel() * inputs[0].toTensor().size(-1);
  }
  if (name == "aten::addmm" || name == "aten::baddbmm") {
    return result.numel() * inputs[1].toTensor().size(-1);
  }
  return 0;
}

std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& function) {
  ++running;
  auto called = std::make_unique<Called>();
  const auto inputs = function.inputs();
  called->inputs.assign(inputs.begin(), inputs.end());
  return called;
}

void after(const at::RecordFunction& function, at::ObserverContext* context) {
  --running;
  for (const auto& value : function.outputs()) {
    if (value.isTensor() && value.toTensor().defined()) {
      macs += macs_of(function.name(), static_cast<Called*>(context)->inputs, value.toTensor());
      if (running == 0) {  // what operators make for themselves is gone
        note(value.toTensor());
      }
    }
  }
}

std::vector<std::int64_t> sizes_of(const std::string& text) {
  std::vector<std::int64_t> sizes;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    sizes.push_back(std::stoll(part));
  }
  return sizes;
}

}  // namespace

int main(int argc, const char* argv[]) {
  if (argc != 3) {
    std::cerr << "usage: analyse MODEL.pt SIZE, such as 1,3,224,224\n";
    return 2;
  }
  try {
    auto model = torch::jit::load(argv[1]);
    const auto input = torch::zeros(sizes_of(argv[2]));
    std::int64_t weights = 0;
    for (const auto& parameter : model.parameters()) {
      weights += static_cast<std::int64_t>(parameter.nbytes());
      known.insert(parameter.storage().unsafeGetStorageImpl());
    }
    for (const auto& buffer : model.buffers()) {
      known.insert(buffer.storage().unsafeGetStorageImpl());
    }
    known.insert(input.storage().unsafeGetStorageImpl());
    at::addGlobalCallback(
        at::RecordFunctionCallback(before, after).needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
    const torch::NoGradGuard no_grad;
    model.forward({input});
    std::cout << "weights " << weights << "\nactivations " << activations << "\nmacs " << macs << "\n";
  } catch (const std::exception& error) {
    std::cerr << "error: " << std::string(error.what()).substr(0, 300) << "\n";
    return 1;
  }
  return 0;
}
