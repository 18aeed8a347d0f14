// Serves a saved model over HTTP: several threads call one loaded model at the same time.
//
//     serve model.pt 1,4 8080                          a model, the shape of its input, a port
//     curl --data '0.5 1 -2 0.25' localhost:8080       numbers in, numbers out
//
// A real service would use an HTTP library and send bytes instead of text. It would keep the
// bounded queue, the threads that share a model, errors that end a request but not the process, and
// a shutdown (SIGINT, SIGTERM) that first answers every accepted request.

#include <ATen/Parallel.h>
#include <torch/script.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <mutex>
#include <optional>
#include <queue>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "http.h"

using Shape = std::vector<int64_t>;

// Connections that wait for a thread. While it is full, no more are accepted, and clients wait.
class Queue {
 public:
  void push(int connection) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return waiting_.size() < kCapacity; });
    waiting_.push(connection);
    changed_.notify_all();
  }

  // Returns nothing when the queue is closed and empty.
  std::optional<int> pop() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
    if (waiting_.empty()) return std::nullopt;
    const int connection = waiting_.front();
    waiting_.pop();
    changed_.notify_all();
    return connection;
  }

  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

 private:
  static constexpr size_t kCapacity = 64;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::queue<int> waiting_;
  bool closed_ = false;
};

torch::Tensor to_tensor(const std::string& text, const Shape& shape) {
  std::vector<float> numbers;
  const char* place = text.c_str();
  for (char* next; true; place = next) {
    const float number = std::strtof(place, &next);
    if (next == place) break;
    numbers.push_back(number);
  }
  place += std::strspn(place, " \t\r\n");
  if (*place) throw std::runtime_error("not a number: " + std::string(place).substr(0, 20));
  return torch::tensor(numbers).reshape(shape);  // an error if there are too few or too many
}

std::string to_text(const torch::Tensor& tensor) {
  const torch::Tensor numbers = tensor.to(torch::kFloat).contiguous();
  std::ostringstream text;
  text.precision(9);
  for (int64_t i = 0; i < numbers.numel(); ++i) text << numbers.const_data_ptr<float>()[i] << ' ';
  return text.str();
}

void answer(int connection, torch::jit::Module& model, const Shape& shape) {
  std::string status = "400 Bad Request", text;
  try {
    const torch::Tensor input = to_tensor(http::receive(connection), shape);
    status = "500 Internal Server Error";
    text = to_text(model.forward({input}).toTensor());
    status = "200 OK";
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  }
  http::respond(connection, status, text);
}

int main(int count, char** words) try {
  if (count != 4) throw std::runtime_error("usage: serve MODEL SHAPE PORT");
  sigset_t ending;  // blocked in every thread; main waits for it below
  sigemptyset(&ending);
  sigaddset(&ending, SIGINT);
  sigaddset(&ending, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &ending, nullptr);

  Shape shape;
  std::istringstream sizes(words[2]);
  for (std::string size; std::getline(sizes, size, ',');) shape.push_back(std::stoll(size));
  torch::jit::Module model = torch::jit::load(words[1], torch::kCPU);
  at::set_num_threads(1);                // per call: several requests fill the cores
  model.forward({torch::zeros(shape)});  // maps the compiled code and packs the weights

  auto port = static_cast<uint16_t>(std::stoi(words[3]));
  const int listener = http::listen_on(port);
  std::cout << "http://127.0.0.1:" << port << std::endl;

  Queue queue;
  std::vector<std::thread> workers;
  for (unsigned i = 0; i < std::max(1U, std::thread::hardware_concurrency()); ++i) {
    workers.emplace_back([&] {
      const c10::InferenceMode inference;  // per thread
      while (const auto connection = queue.pop()) answer(*connection, model, shape);
    });
  }
  std::thread acceptor([&] {
    while (true) {
      const int connection = accept(listener, nullptr, nullptr);
      if (connection >= 0) {
        queue.push(connection);
      } else if (errno == EINVAL) {
        return;  // shutdown, see below; other errors concern one client
      }
    }
  });

  int signal;
  sigwait(&ending, &signal);
  shutdown(listener, SHUT_RDWR);  // `accept` fails with EINVAL
  acceptor.join();
  queue.close();
  for (std::thread& worker : workers) worker.join();
} catch (const c10::Error& error) {
  std::cerr << words[1] << ": " << error.what_without_backtrace() << '\n';
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
