// Just enough HTTP to try serve.cpp with curl: one POST per connection, on this machine.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace http {

// Returns a socket that listens at 127.0.0.1 on a port; for 0, the system chooses one.
inline int listen_on(uint16_t& port) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  const int yes = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  socklen_t size = sizeof address;
  auto* const place = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, place, size) != 0 || listen(listener, SOMAXCONN) != 0) {
    throw std::runtime_error("port " + std::to_string(port) + ": " + std::strerror(errno));
  }
  getsockname(listener, place, &size);
  port = ntohs(address.sin_port);
  return listener;
}

inline void send_all(int connection, const std::string& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t sent = send(connection, &bytes[done], bytes.size() - done, MSG_NOSIGNAL);
    if (sent <= 0) return;  // the client is gone
    done += static_cast<size_t>(sent);
  }
}

// Returns the body of the next request.
inline std::string receive(int connection) {
  constexpr size_t kLargest = size_t{64} << 20;
  const timeval patience{10, 0};  // a client that stalls must not block a thread
  setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);

  std::string bytes;
  const auto receive_until = [&](const auto& complete) {
    for (char part[1 << 16]; !complete();) {
      const ssize_t count = recv(connection, part, sizeof part, 0);
      if (count <= 0) throw std::runtime_error("the request ends early");
      bytes.append(part, static_cast<size_t>(count));
      if (bytes.size() > kLargest) throw std::runtime_error("the request is too large");
    }
  };
  receive_until([&] { return bytes.find("\r\n\r\n") != std::string::npos; });
  const size_t start = bytes.find("\r\n\r\n") + 4;

  std::string header = bytes.substr(0, start);
  for (char& letter : header) letter = static_cast<char>(std::tolower(letter));
  const std::string field = "\r\ncontent-length:";
  const size_t found = header.find(field);
  if (found == std::string::npos) throw std::runtime_error("the request has no Content-Length");
  const size_t size = std::strtoull(&header[found + field.size()], nullptr, 10);
  if (size > kLargest) throw std::runtime_error("the request is too large");
  if (header.find("100-continue") != std::string::npos) {
    send_all(connection, "HTTP/1.1 100 Continue\r\n\r\n");  // curl asks before it sends a megabyte
  }
  receive_until([&] { return bytes.size() >= start + size; });
  return bytes.substr(start, size);
}

// Sends the answer, e.g. ("200 OK", "0.1 0.9"), and ends the connection.
inline void respond(int connection, const std::string& status, const std::string& text) {
  send_all(connection, "HTTP/1.1 " + status + "\r\nConnection: close\r\nContent-Length: " +
                           std::to_string(text.size() + 1) + "\r\n\r\n" + text + "\n");
  close(connection);
}

}  // namespace http
