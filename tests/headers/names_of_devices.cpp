#include <regex>
#include <cstdio>
int main(int count, char** names) {
  for (int i = 1; i < count; i++) {
    std::regex pattern("");
    std::smatch parts;
    bool known = std::regex_match(std::string(names[i]), parts, pattern);
    printf(known ? "%s,%s\n" : "unknown\n", parts[1].str().c_str(), parts[3].str().c_str());
  }
}
