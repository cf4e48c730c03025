"""Runs one module of rdma-core's test-suite: suite.py PARENT-OF-TESTS DEVICE MODULE.

For each test it prints a line, RESULT and a JSON object, and one at the end. The package
itself is not imported: it would load the modules of all vendors first.
"""
import importlib
import json
import os
import sys
import types
import unittest

parent, device, module = sys.argv[1:]
tests = types.ModuleType("tests")
tests.__path__ = [parent + "/tests"]
sys.modules["tests"] = tests
sys.path[:0] = [parent, parent + "/tests"]
sys.argv[1:] = ["--dev", device, "--port", "1"]
importlib.import_module("args_parser").parser.parse_args()


def say(what, test="", why=""):
    print("RESULT " + json.dumps({"What": what, "Test": test, "Why": why}), flush=True)


class Result(unittest.TestResult):
    def addSuccess(self, test):
        say("passed", test.id())

    def addSkip(self, test, reason):
        say("skipped", test.id(), reason)

    def addFailure(self, test, err):
        say("failed", test.id(), self._exc_info_to_string(err, test))

    def addError(self, test, err):
        say("failed", test.id(), self._exc_info_to_string(err, test))

    def addSubTest(self, test, subtest, err):
        if err is not None:
            say("failed", subtest.id(), self._exc_info_to_string(err, test))

    def addUnexpectedSuccess(self, test):
        say("failed", test.id(), "unexpected success")


unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module("tests." + module)).run(Result())
say("ended")
os._exit(0)  # skip the clean-up of pyverbs at interpreter exit, whose order is undefined
