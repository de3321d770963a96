"""The check of clients' rights for gRPC's own engine, at each call; the native engine has it in its
listener.
"""

import inspect
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio

from server.rpc.call_access import CallAccess
from server.rpc.credentials import AllowedNames
from server.rpc.errors import StatusError
from server.rpc.recheck import while_allowed

_ARITY: Final = ("unary", "stream")


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Checks for gRPC's own engine, at each call of whatever service, the names in the client's
    certificate, and whether the client may make it.
    """

    def __init__(self, allowed: AllowedNames, access: CallAccess) -> None:
        self._allowed = allowed
        self._access = access

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The method's handler, behind the check."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        path = handler_call_details.method
        kind = f"{_ARITY[handler.request_streaming]}_{_ARITY[handler.response_streaming]}"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        function = getattr(handler, kind)
        stays_open = handler.request_streaming or handler.response_streaming
        if stays_open and self._access:
            function = self._while_allowed(path, function)
        return make(
            self._checked(path, function, streams=handler.response_streaming),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _while_allowed(self, path: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A streaming method that ends once its client may not make the call any more."""

        async def call(request: Any, context: Any) -> Any:
            metadata = tuple(context.invocation_metadata() or ())
            names = tuple(context.auth_context().get("x509_common_name", ()))
            check = partial(self._access.check_again, path, metadata, names, context.peer())
            answers = function(request, context)
            work = answers if inspect.isawaitable(answers) else _written(answers, context)
            try:
                return await while_allowed(work, check)
            except StatusError as err:
                await context.abort(err.status, str(err))

        return call

    def _checked(
        self, path: str, function: Callable[..., Any], *, streams: bool
    ) -> Callable[..., Any]:
        async def check(context: Any) -> None:
            names = context.auth_context().get("x509_common_name", ())
            try:
                self._allowed.check(names)
                metadata = context.invocation_metadata() or ()
                self._access.check_call(path, metadata, names, context.peer())
            except StatusError as err:
                await context.abort(err.status, str(err))

        async def answer(request: Any, context: Any) -> Any:
            await check(context)
            return await function(request, context)

        async def stream(request: Any, context: Any) -> None:
            await check(context)
            answers = function(request, context)
            # gRPC takes both: a generator of the answers, and a coroutine that writes them.
            await (answers if inspect.isawaitable(answers) else _written(answers, context))

        return stream if streams else answer


async def _written(answers: AsyncIterator[Any], context: Any) -> None:
    async for message in answers:
        await context.write(message)
